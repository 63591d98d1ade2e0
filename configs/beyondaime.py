"""Integer-answer mathematics with a Python tool, by SAO.

  python experiments/run.py --config=configs/beyondaime.py          the embedded default: two cores, no network
  python experiments/run.py --config=configs/beyondaime.py:grpo     a baseline on the same task
  configs/beyondaime.py:paper                                       every number of the paper, with its source; it runs as configs/qwen3.py:30b,
                                                                    which adds weights, chat format and a mesh

The default takes six to eight minutes on two cores, half of them for the warm start; expect held-out pass@1 to rise from about
0.43 to about 0.93 (0.94, 0.90, 0.94 for the seeds 0, 1, 2), mostly in the first 60 updates, and tool use from one half to all.

Variants: sao (default), grpo_dis, grpo, vapo, running_mean; paper.
"""

from ml_collections import ConfigDict

VARIANTS = ('sao', 'grpo_dis', 'grpo', 'vapo', 'running_mean', 'paper')


def get_config(variant: str = 'sao') -> ConfigDict:
  """The whole configuration of a run, locked. A variant is a diff on the embedded default."""
  if variant not in VARIANTS:
    raise ValueError(f'variant {variant!r} is unknown: choose one of {", ".join(VARIANTS)}')
  config = _embedded()
  config.variant = variant
  if variant == 'paper':
    _paper(config)
  else:
    _baseline(config, variant)
  return config.lock()


def _embedded() -> ConfigDict:
  """SAO on procedural problems with a decoder of about 100k parameters."""
  c = ConfigDict()
  c.variant = 'sao'
  c.seed = 0

  c.data = ConfigDict()
  c.data.path = ''  # a .jsonl or .csv file of problems; '' makes up those of the warm start
  c.data.heldout_path = (
    ''  # the same for evaluation; '' holds out a tenth of all questions, by their text
  )
  c.data.kinds = ('arithmetic', 'modular', 'counting')  # of made-up problems
  c.data.levels = (1, 2)  # of difficulty, 1 to 4

  c.env = ConfigDict()
  c.env.max_turns = 3  # tool calls and answer; the call that would exceed it ends the episode
  c.env.observation_bytes = 24  # of tool output that the agent sees
  c.env.max_turn_tokens = 48  # sampled in one turn
  c.env.max_tokens = 144  # of the whole episode, prompt and observations included
  c.env.grader_timeout_s = 15.0  # of judging one answer that is no integer
  c.env.temperature = 1.0  # of sampling; training uses the same

  c.sandbox = ConfigDict()
  c.sandbox.num_workers = 2  # calls that run at once
  c.sandbox.timeout_s = 2.0  # of one call
  c.sandbox.memory_mb = 256  # of one call
  c.sandbox.output_bytes = 4096  # read from one call
  c.sandbox.latency_s = (
    0.0  # for studies of asynchrony: each call takes this much longer, times Pareto(1.5)
  )
  c.sandbox.max_latency_s = 30.0  # and no more

  c.chat = ConfigDict()
  c.chat.format = 'bytes'  # how an episode is written; or smollm2, qwen3
  c.chat.tokenizer = (
    ''  # folder with the tokenizer.json of smollm2 or qwen3; '' takes model.weights
  )
  c.chat.system = ''  # text of the system turn
  c.chat.prefill = ''  # smollm2: what the prompt ends with; {question} stands for the question
  c.chat.thinking = 'free'  # qwen3: it opens <think> itself; open: its prompt does; off: empty
  c.chat.tools = True  # whether the agent may call Python; bytes always may

  c.model = ConfigDict()
  c.model.weights = ''  # a Hugging Face folder; '' draws them at random
  c.model.upcycle = False  # the weights are of a dense model, whose MLP becomes every expert
  c.model.router_stddev = 0.02  # of the random router then
  c.model.vocab_size = 0  # 0: that of the chat format
  c.model.width = 64
  c.model.num_layers = 2
  c.model.num_heads = 4
  c.model.num_kv_heads = 2
  c.model.head_dim = 16
  c.model.mlp_width = 192
  c.model.num_experts = 0  # 0: a dense decoder
  c.model.experts_per_token = 0
  c.model.normalize_topk = True  # the weights of a token's experts add up to 1
  c.model.expert_backend = 'blocked'  # or ragged, dense; docs/moe.md has them measured
  c.model.rope_theta = 10000.0
  c.model.rope_scaling = ConfigDict()  # Llama 3's longer context
  c.model.rope_scaling.factor = 0.0  # 0: none
  c.model.rope_scaling.low_freq_factor = 1.0
  c.model.rope_scaling.high_freq_factor = 4.0
  c.model.rope_scaling.original_max_position = 8192
  c.model.norm_eps = 1e-6
  c.model.qk_norm = True
  c.model.qkv_bias = False
  c.model.tied = True
  # Of the learner: or chunked, cudnn, pallas; models/backends.py has what each can do. An engine holds the scores of a prefill piece.
  c.model.attention = 'xla'
  c.model.attention_chunk = 512  # tokens of a block of 'chunked'
  c.model.window = 0  # tokens that a token sees back; 0: all
  c.model.sinks = 0  # first tokens that stay in sight, with a window
  c.model.lora_rank = 0  # of adapters on one frozen backbone for policy and critic; 0: whole models
  c.model.lora_alpha = 16.0  # their scale is lora_alpha / lora_rank
  c.model.dtype = 'float32'  # of compute; masters are float32
  c.model.head_dtype = 'float32'  # of the logits' operands; bfloat16 is far cheaper on accelerators, and k3 shows what it costs
  c.model.remat = 'none'

  c.mesh = ConfigDict()  # devices of the learner along each axis
  c.mesh.data = 1  # copies of the parameters; the slow axis, if there is one
  c.mesh.fsdp = 1  # cuts parameters and rows
  c.mesh.tensor = 1  # cuts heads and widths
  c.mesh.expert = 1  # cuts experts and rows
  c.mesh.sequence = 1  # cuts the tokens of a row

  c.engine = ConfigDict()
  c.engine.tensor = 1  # devices that share heads and widths
  c.engine.expert = 1  # devices that share experts and slots
  c.engine.apart = False  # on devices after those of the learner; or on the first of them
  c.engine.num_slots = 128  # episodes that decode together
  c.engine.decode_steps = 8  # tokens between looks at new requests and weights
  c.engine.prefill_rows = 16  # prompts or observations of one prefill call
  c.engine.prefill_buckets = (16, 48)  # lengths that are compiled

  c.supervised = ConfigDict()  # the warm start on scripted demonstrations
  c.supervised.workdir = ''  # of another run, whose warm start this one takes over; '' makes one
  c.supervised.num_steps = 900
  c.supervised.num_demonstrations = 20000
  c.supervised.batch_size = 60  # demonstrations a step
  c.supervised.learning_rate = 3e-3
  c.supervised.warmup_steps = 50
  c.supervised.tool_share = 0.5  # demonstrations that use the tool; the others answer at once
  c.supervised.slip_share = 0.2  # of those, how many slip in the first call

  c.value = ConfigDict()  # value pretraining: critic only, on rollouts of the warm start
  c.value.num_batches = 6  # of train.batch_size episodes; the paper uses 6k rollouts
  c.value.updates_per_batch = 4  # calls of K critic updates on each batch
  c.value.head = 'scalar'  # or 'categorical' (HL-Gauss)
  c.value.low = 0.0  # support of the categorical head: the range of returns
  c.value.high = 1.0
  c.value.num_bins = 51
  c.value.sigma_ratio = 0.75

  c.sao = ConfigDict()
  c.sao.objective = 'dis'  # or ppo, decoupled_ppo, icepop, cispo, gspo, reinforce
  c.sao.eps_low = 0.3  # section 3.1, mathematics: kept region 0.7 < r < 6
  c.sao.eps_high = 5.0
  c.sao.clip_low = 0.2  # of objectives that clip (ppo, gspo, cispo): 1 - clip_low
  c.sao.clip_high = 0.28  # clip-higher
  c.sao.advantages = 'gae'  # or group_relative, leave_one_out, running_mean
  c.sao.normalize_std = True  # group_relative only
  c.sao.baseline_window = 8  # running_mean: rewards that are remembered, section 4.3
  c.sao.baseline_key = 'prompt'  # running_mean: a window for each prompt, or one 'global' window
  c.sao.discount = 1.0  # unstated in the paper
  c.sao.alpha = 1.5  # lambda_policy = 1 - 1 / (alpha l), section 3.2
  c.sao.critic_lambda = 1.0  # the critic's target is the return, section 3.2
  c.sao.critic_updates = 2  # K, section 3.2; 0 without a critic
  c.sao.advantage_values = 'after'  # the K updates; or 'before'
  c.sao.bootstrap_truncated = False  # True: a budget that ends an episode is no verdict on it
  c.sao.policy_freeze_steps = 5  # critic-only updates at the start of RL; unstated in the paper
  c.sao.policy_minibatches = 1  # sequential policy steps an update

  c.policy = ConfigDict()  # AdamW of the policy
  c.policy.learning_rate = 5e-4
  c.policy.warmup_steps = 5
  c.policy.b1 = 0.9
  c.policy.b2 = 0.95
  c.policy.eps = 1e-8
  c.policy.weight_decay = 0.0
  c.policy.clip_norm = 1.0
  c.policy.frozen = ()  # of attention, router, experts
  c.policy.router_scale = (
    1.0  # of the steps of a router; gradients would not do, AdamW divides their scale out
  )
  c.policy.experts_scale = 1.0

  c.critic = ConfigDict()  # AdamW of the critic; steps are critic updates
  c.critic.learning_rate = 2e-3
  c.critic.warmup_steps = 10
  c.critic.b1 = 0.9
  c.critic.b2 = 0.95
  c.critic.eps = 1e-8
  c.critic.weight_decay = 0.0
  c.critic.clip_norm = 1.0
  c.critic.frozen = ('attention',)  # section 3.2
  c.critic.router_scale = 1.0
  c.critic.experts_scale = 1.0

  c.train = ConfigDict()
  c.train.num_steps = 120
  c.train.batch_size = 64  # trajectories an update
  c.train.group_size = 1  # episodes a prompt
  c.train.micro_rows = 16  # packed rows of env.max_tokens of one forward pass
  c.train.logprob_chunk = 1024  # tokens whose logits are alive at once
  c.train.optimizer_memory = 'device'  # or 'pinned_host', from where an update fetches it
  c.train.compression = 'none'  # of gradients over mesh.data: bfloat16, int8
  c.train.save_every = 20  # updates
  c.train.keep = 2  # checkpoints
  c.train.max_skipped_in_row = (
    10  # updates that are not finite and change nothing; then the run has diverged
  )
  c.train.max_k3 = (
    10.0  # nats a token (mismatch/k3) in three updates running: it has diverged; inf: off
  )
  c.train.reward_fall = 1.0  # share of its best that the mean reward of a window may lose; 1: off
  c.train.reward_window = 20  # updates
  c.train.max_rollbacks = 2  # to the last checkpoint, when it has diverged; then exit code 3

  c.runtime = ConfigDict()
  # 'async'; 'sync', one batch at a time, for comparison; 'deterministic', async under a logical clock: it repeats bit for bit
  c.runtime.mode = 'async'
  c.runtime.pipeline_depth = 1  # batches in flight beyond the one that trains: the usual lag
  c.runtime.max_staleness = 8  # versions; older tokens are masked and counted
  c.runtime.consume = (
    'oldest_started'  # or 'completion' order, under which long episodes are staler (docs/bias.md)
  )
  c.runtime.late = 'mask'  # tokens beyond max_staleness; or 'drop' their episodes, which is biased to short ones (docs/bias.md)
  c.runtime.record = True  # what `run.py --replay=WORKDIR` needs, in replay.jsonl
  c.runtime.retries = ConfigDict()  # further episodes of a prompt after a failure of this kind
  c.runtime.retries.infra = 2
  c.runtime.retries.env = 2
  c.runtime.retries.grader = 1
  c.runtime.back_off_s = 0.2  # before the first retry; doubled for each further one
  c.runtime.max_back_off_s = 5.0
  c.runtime.grader_holds = 2  # times that an answer is judged again when the grader is out
  c.runtime.max_failures_in_row = 64  # of one environment: its breaker opens
  c.runtime.breaker_cooldown_s = 5.0  # before one episode may try again; doubled each time
  c.runtime.breaker_openings = 2  # in a row; at the next the run ends with exit code 3
  c.runtime.episode_timeout_s = 120.0
  c.runtime.stall_timeout_s = 300.0  # without any progress the run ends with exit code 3
  c.runtime.stop_timeout_s = (
    60.0  # after a signal a checkpoint must be there; else the last one has to do
  )
  c.runtime.heartbeat_s = (
    60.0  # of several processes: one that is silent for so long ends the others
  )
  c.runtime.logical = ConfigDict()  # logical seconds in deterministic mode
  c.runtime.logical.round_s = 0.01  # a round of the engine
  c.runtime.logical.tool_s = 0.05  # a tool call
  c.runtime.logical.grade_s = 0.01  # a verdict
  c.runtime.logical.update_s = 0.2  # an update of the learner

  c.evaluation = ConfigDict()
  c.evaluation.every = 20  # updates
  c.evaluation.num_problems = 256  # held out from training by their text
  c.evaluation.samples = 1  # episodes a problem
  c.evaluation.temperature = 1.0  # the paper's evaluation: temperature 1, top-p 1
  return c


def _baseline(c: ConfigDict, variant: str) -> None:
  """The methods that SAO is compared with, as diffs."""
  if variant in ('grpo', 'grpo_dis'):
    c.train.group_size = 8  # section 4.1: 16 prompts x 8
    c.sao.advantages = 'group_relative'
    c.sao.critic_updates = 0
    c.sao.policy_freeze_steps = 0
    c.value.num_batches = 0
  if variant in ('grpo', 'vapo'):
    c.train.max_k3 = float('inf')  # a collapse is what these two are there to show
    c.sao.objective = 'ppo'  # the ratio is to the latest policy before the update
    c.sao.policy_minibatches = 2
  if variant == 'vapo':
    c.critic.frozen = ()
    c.sao.critic_updates = 1
  if variant == 'running_mean':
    c.sao.advantages = 'running_mean'
    c.sao.baseline_key = (
      'global'  # made-up prompts do not come back; as in the online simulation (4.5)
    )
    c.sao.baseline_window = 128
    c.sao.critic_updates = 0
    c.sao.policy_freeze_steps = 0
    c.value.num_batches = 0


def _paper(c: ConfigDict) -> None:
  """The paper's run: arXiv 2607.07508, section 4.1 where nothing else is said. configs/qwen3.py:30b puts it on a cluster."""
  c.data.path = 'data/train.jsonl'  # the paper's training problems are not public: bring your own
  c.data.heldout_path = 'data/beyondaime.jsonl'
  c.env.max_turns = 50  # tool turns in evaluation
  c.env.observation_bytes = 8192  # unstated
  c.env.max_turn_tokens = 131072  # no limit below the episode's
  c.env.max_tokens = 131072  # 128k tokens
  c.sandbox.num_workers = 64  # unstated
  c.sandbox.timeout_s = 10.0  # unstated
  c.sandbox.memory_mb = 1024  # unstated
  c.sandbox.output_bytes = 65536  # unstated
  c.model.width = 2048  # Qwen3-30B-A3B-Thinking-2507, its published config
  c.model.num_layers = 48
  c.model.num_heads = 32
  c.model.num_kv_heads = 4
  c.model.head_dim = 128
  c.model.mlp_width = 768  # of one expert
  c.model.num_experts = 128
  c.model.experts_per_token = 8
  c.model.rope_theta = 1e7
  c.model.tied = False
  c.model.dtype = 'bfloat16'
  c.model.remat = 'nothing_saveable'  # unstated
  c.model.attention = 'chunked'  # unstated
  c.engine.num_slots = 256  # unstated
  c.engine.prefill_buckets = (512, 4096, 32768)  # unstated
  c.supervised.num_steps = 0  # the paper fine-tunes for 3 epochs on tool-integrated reasoning
  c.value.num_batches = 47  # 6k rollouts of the initial policy in batches of 128 (3.2)
  c.value.updates_per_batch = 1  # unstated
  c.sao.bootstrap_truncated = True  # unstated
  c.sao.policy_freeze_steps = 0  # unstated
  c.policy.learning_rate = 1e-6  # 3.2
  c.policy.warmup_steps = 0  # unstated
  c.critic.learning_rate = 5e-6  # 3.2
  c.critic.warmup_steps = 10  # 3.2
  c.train.num_steps = 400  # the ablations stop at 400 steps (A.1)
  c.train.batch_size = 128
  c.train.micro_rows = 1  # unstated
  c.runtime.pipeline_depth = 1  # unstated
  c.runtime.max_staleness = 8  # unstated
  c.runtime.episode_timeout_s = 7200.0  # unstated
  c.runtime.stall_timeout_s = 14400.0  # unstated
  c.evaluation.num_problems = 100  # all of BeyondAIME
  c.evaluation.samples = 4  # mean of 4 runs for BeyondAIME, 16 for the others
