"""Every notebook is committed clean and runs from top to bottom in a fresh kernel of this interpreter."""

import re
import shutil
import sys
from pathlib import Path

import ipykernel.kernelspec
import nbclient
import nbformat
import pytest

FOLDER = Path(__file__).parents[1] / 'notebooks'
NOTEBOOKS = sorted(path.name for path in FOLDER.glob('*.ipynb'))
INSTALL = re.compile(
  r'\bpip3?\s+install\b|\bgit\s+clone\b|\bapt(-get)?\s+install\b|\bconda\s+install\b'
)

every_notebook = pytest.mark.parametrize('name', NOTEBOOKS)


def read(name: str) -> tuple[nbformat.NotebookNode, list[nbformat.NotebookNode]]:
  """(the notebook as committed, its code cells)"""
  notebook = nbformat.read(FOLDER / name, as_version=4)
  return notebook, [cell for cell in notebook.cells if cell.cell_type == 'code']


def test_the_notebooks_are_found():
  assert 'losses.ipynb' in NOTEBOOKS  # else the parametrised tests below would pass on nothing


@every_notebook
def test_committed_without_outputs(name):
  notebook, code = read(name)
  nbformat.validate(notebook)
  assert code
  for index, cell in enumerate(code):
    assert not cell.outputs, f'code cell {index} has stored outputs: clear them before the commit'
    assert cell.execution_count is None, f'code cell {index} has an execution count: clear it'
    assert 'execution' not in cell.metadata, f'code cell {index} has stored times: clear them'


@every_notebook
def test_only_the_first_code_cell_installs(name):
  _, code = read(name)
  installing = [index for index, cell in enumerate(code) if INSTALL.search(cell.source)]
  assert installing == [0]
  assert 'except ImportError' in code[0].source  # nothing is installed where the package is there


@every_notebook
@pytest.mark.timeout(600)
def test_runs_from_top_to_bottom(name, tmp_path, monkeypatch):
  # A kernel of this interpreter, found before any that the machine has under the same name.
  ipykernel.kernelspec.write_kernel_spec(tmp_path / 'jupyter' / 'kernels' / 'python3')
  monkeypatch.setenv('JUPYTER_PATH', str(tmp_path / 'jupyter'))
  monkeypatch.setenv('IPYTHONDIR', str(tmp_path / 'ipython'))  # nor its start-up files
  monkeypatch.setenv('SAO_NOTEBOOK_SUPERVISED_STEPS', '10')  # too few to learn anything
  monkeypatch.setenv('SAO_NOTEBOOK_STEPS', '2')
  folder = tmp_path / 'notebooks'
  shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns('.*'))

  notebook = nbformat.read(folder / name, as_version=4)
  asking = nbformat.v4.new_code_cell(
    'import os, sys\nprint(sys.executable, os.getcwd(), sep="\\n")'
  )
  notebook.cells.append(asking)
  # Raises CellExecutionError, with the cell and its traceback, if a cell fails.
  nbclient.NotebookClient(
    notebook, timeout=500, kernel_name='python3', resources={'metadata': {'path': str(folder)}}
  ).execute()

  code = [cell for cell in notebook.cells if cell.cell_type == 'code']
  assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
  executable, directory = asking.outputs[0].text.split('\n')[:2]
  assert executable == sys.executable
  assert Path(directory).samefile(folder)
