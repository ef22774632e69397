"""A stage without threads or sockets: a plan and hidden states in, hidden states and a digest out."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from memkv_pp.cache import cuda_ops, host_attention, host_kernels
from memkv_pp.cache.attention import PackedAttention
from memkv_pp.cache.cuda_attention import CudaAttention
from memkv_pp.cache.device import TorchDevice
from memkv_pp.cache.kv import StageCache
from memkv_pp.clock import Clock, SystemClock
from memkv_pp.config import PipelineConfig
from memkv_pp.errors import ConfigError, InternalError, PlanOrderError, StageClosed
from memkv_pp.model.adapters import load_stage
from memkv_pp.stage import memory
from memkv_pp.stage.runner import FIXED_ROWS, Runner, splits_evenly
from memkv_pp.stage.sampler import draw_token
from memkv_pp.wire import Plan, Sampling, StepDone

TORCH_DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


@dataclass(frozen=True, kw_only=True, slots=True)
class StageStatistics:
    """What a stage says of itself, asked of its tensors and its process.

    ``peak_bytes`` is the most memory the process held beyond what it had before the weights were
    loaded (CUDA: the allocator's peak). ``layers_run``: layers times plans with rows.
    """

    stage: int
    layers: tuple[int, int]
    pid: int
    device_uuid: str
    weight_bytes: int
    allocated_bytes: int
    peak_bytes: int
    plans_applied: int
    layers_run: int
    sequences: int
    used_bytes: int


class StageRuntime:
    """Owns one stage's weights and cache, and applies plans strictly by number.

    The constructor compiles the kernels of its device where they are not yet, loads the weights
    and allocates the arena. Not thread-safe: one thread, which the constructor sets to
    ``config.threads`` torch threads.
    """

    def __init__(self, config: PipelineConfig, stage: int, clock: Clock | None = None) -> None:
        torch.set_num_threads(config.threads)
        self._config = config
        self._stage = stage
        self._clock = clock or SystemClock()
        self._device = TorchDevice(config.devices[stage])
        attention = _load_attention(self._device.torch_device)
        memory.reset_peak()
        self._resident_before = memory.resident_bytes()
        self._first = stage == 0
        self._last = stage == config.num_stages - 1
        layers = config.fence.layers_of(stage)
        with torch.inference_mode():
            self._model = load_stage(
                Path(config.model),
                layers=layers,
                first=self._first,
                last=self._last,
                dtype=TORCH_DTYPES[config.dtype],
                device=self._device.torch_device,
            )
            self._cache = StageCache(
                self._device,
                config.geometry,
                config.sizings()[stage],
                config.units[stage],
                max_sequences=config.max_sequences,
                fp8_scales=config.fp8_scales,
                attention=attention,
            )
        self._runner = Runner(self._model, self._cache, layers, deterministic=config.deterministic)
        if config.deterministic:
            self._check_deterministic()
        if cuda_ops.loaded(self._device.torch_device) is not None:
            with torch.inference_mode():
                self._runner.warm_up()
        self._samplings: dict[int, Sampling] = {}
        self._next_plan = 0
        self._layers_run = 0
        self._closed = False

    @property
    def hidden_shape(self) -> tuple[int, torch.dtype]:
        """(elements of a hidden row, dtype) of the boundary tensors."""
        return self._model.hidden_size, TORCH_DTYPES[self._config.dtype]

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the arena, asked of its tensor."""
        return self._cache.arena.allocated_bytes

    def check_next(self, plan: Plan) -> None:
        """PlanOrderError unless ``plan`` is the next; StageClosed after ``close``."""
        if self._closed:
            raise StageClosed(f"stage {self._stage} is closed", stage=self._stage)
        if plan.number != self._next_plan:
            what = "a gap before it" if plan.number > self._next_plan else "applied before"
            raise PlanOrderError(
                f"stage {self._stage}: plan {plan.number} has {what}, plan {self._next_plan} is next",
                stage=self._stage,
            )

    @torch.inference_mode()
    def apply(
        self, plan: Plan, hidden_TH: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, StepDone]:
        """Apply ``plan``: (hidden states for the next stage, digest).

        ``hidden_TH`` comes from the stage before, None on the first. The first answer is None on
        the last stage and for plans without rows. PlanOrderError if the plan is not the next.
        """
        self.check_next(plan)
        self._next_plan += 1
        for sequence in plan.closed:
            self._cache.close(sequence)
            del self._samplings[sequence]
        for opened in plan.opened:
            self._cache.open(opened.sequence)
            self._samplings[opened.sequence] = opened.sampling
        batch = self._cache.extend(plan.rows)
        started = self._clock.now()
        out: torch.Tensor | None = None
        tokens: tuple[int, ...] = ()
        if plan.rows:
            out = self._runner.run(batch, self._inputs(plan, hidden_TH))
            self._layers_run += len(self._config.fence.layers_of(self._stage))
            if self._last:
                tokens = self._draw(plan, out)
                out = None
        done = StepDone(
            self._stage,
            plan.number,
            tuple(self._cache.length(rows.sequence) for rows in plan.rows),
            self._cache.used_bytes(),
            self._cache.num_sequences,
            tokens,
            round((self._clock.now() - started) * 1e9),
        )
        return out, done

    def statistics(self) -> StageStatistics:
        """A snapshot; works until ``close``."""
        layers = self._config.fence.layers_of(self._stage)
        device = self._device.torch_device
        if device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(device)
            uuid = str(torch.cuda.get_device_properties(device).uuid)
        else:
            peak, uuid = max(memory.peak_bytes() - self._resident_before, 0), ""
        return StageStatistics(
            stage=self._stage,
            layers=(layers.start, layers.stop),
            pid=os.getpid(),
            device_uuid=uuid,
            weight_bytes=self._model.weight_bytes,
            allocated_bytes=self.allocated_bytes,
            peak_bytes=peak,
            plans_applied=self._next_plan,
            layers_run=self._layers_run,
            sequences=self._cache.num_sequences,
            used_bytes=sum(self._cache.used_bytes()),
        )

    def check(self) -> None:
        """Raise InternalError unless the stage's books balance."""
        self._cache.check()

    def close(self) -> None:
        """Give the cache back; may be called twice."""
        self._closed = True
        self._cache.release()

    def _check_deterministic(self) -> None:
        hidden, threads = self._model.hidden_size, self._config.threads
        if self._model.has_experts:
            raise ConfigError(
                f"--deterministic: the experts of {self._model.family} compute the rows that chose"
                " them together, so a row's products depend on its company",
                "serve without it",
            )
        if hidden % 32:
            raise ConfigError(
                f"--deterministic: a hidden size of {hidden} is no multiple of 32",
                "element-wise functions would differ on vector tails",
            )
        width = self._model.intermediate_size
        if not splits_evenly(width, threads):
            raise ConfigError(
                f"--deterministic: {FIXED_ROWS} rows of the intermediate size {width} leave vector"
                f" tails on {threads} threads, where activations differ",
                "use fewer --threads" if splits_evenly(width, 1) else "serve without it",
            )
        with torch.inference_mode():
            where = self._runner.find_uneven_rows(head=self._last)
        if where is not None:
            raise ConfigError(
                f"--deterministic: equal rows came out of {where} unequal on {threads} threads",
                "this machine's matrix products depend on a row's place: use fewer --threads",
            )

    def _inputs(self, plan: Plan, hidden_TH: torch.Tensor | None) -> torch.Tensor:
        device = self._device.torch_device
        if sum(rows.num_rows for rows in plan.rows) != plan.num_rows:
            raise InternalError(f"plan {plan.number}: {plan.num_rows} tokens do not fill its rows")
        if self._first:
            limit = self._model.vocabulary_size
            if min(plan.tokens) < 0 or max(plan.tokens) >= limit:
                raise InternalError(f"plan {plan.number}: a token id is not in [0, {limit})")
            return self._model.embed(torch.tensor(plan.tokens, dtype=torch.int64, device=device))
        if hidden_TH is None or len(hidden_TH) != plan.num_rows:
            found = "none" if hidden_TH is None else str(len(hidden_TH))
            raise InternalError(
                f"stage {self._stage}: plan {plan.number} has {plan.num_rows} rows, hidden states"
                f" for {found} came"
            )
        return hidden_TH.to(device)

    def _draw(self, plan: Plan, hidden_TH: torch.Tensor) -> tuple[int, ...]:
        first = 0
        wanted: list[tuple[int, int, int]] = []
        for rows in plan.rows:
            first += rows.num_rows
            if rows.sample:
                wanted.append((first - 1, rows.sequence, rows.start + rows.num_rows - 1))
        if not wanted:
            return ()
        index = torch.tensor([row for row, _, _ in wanted], device=hidden_TH.device)
        logits = self._runner.head(hidden_TH[index])
        return tuple(
            draw_token(logits[i], self._samplings[sequence], position)
            for i, (_, sequence, position) in enumerate(wanted)
        )


def _load_attention(device: torch.device) -> PackedAttention | None:
    """The attention of the device's kernels, which are loaded; None where torch code serves."""
    if device.type == "cpu":
        host_kernels.load()
    else:
        cuda_ops.load()
    return host_attention.loaded() if cuda_ops.loaded(device) is None else CudaAttention()
