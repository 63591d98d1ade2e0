"""Runs untrusted Python: the tool of an agent."""

from sao_jax.sandbox.python import PythonSandbox, ToolResult, ToolStatus

__all__ = ['PythonSandbox', 'ToolResult', 'ToolStatus']
