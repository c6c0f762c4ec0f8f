"""Settings and fixtures that tests share.

Slow modules are imported inside functions. The process that distributes the tests does
not need them, and the workers would wait while that process imports them.
"""

import gc
import logging
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import support.scheduling  # noqa: F401  for its effects

# isort: split
import mlx.core as mx
import pytest
from hypothesis import HealthCheck, Phase, settings

from support.processes.reader import Reader

if TYPE_CHECKING:
    from support.caches.cache_twins import Mixers
    from support.processes.commands import Commands

# A shell starts background programs with Ctrl-C ignored. Their children inherit this.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: the first example compiles kernels, and the machine can be busy.
# Few examples: every run draws new ones, and make test-long draws many.
settings.register_profile("default", deadline=None, print_blob=True, max_examples=25)
settings.register_profile(
    "long",
    deadline=None,
    print_blob=True,
    max_examples=1000,
    stateful_step_count=100,
    suppress_health_check=[HealthCheck.too_slow],
)
# For mutation testing: finding a fault is enough, so examples are not shrunk.
settings.register_profile(
    "mutants",
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
# The option --hypothesis-profile overrides this.
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add the fixture `reader`, a process with OpenBLAS, to tests marked `openblas`.

    In that process MLX_SPECULATION_BLAS is "auto", and nothing is added.
    """
    if os.environ["MLX_SPECULATION_BLAS"] != "auto":
        for item in items:
            if isinstance(item, pytest.Function) and item.get_closest_marker(
                "openblas"
            ):
                item.fixturenames.append("reader")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test marked `openblas` in the process of the fixture `reader`."""
    reader: Any = pyfuncitem.funcargs.get("reader")
    if reader is None or pyfuncitem.get_closest_marker("openblas") is None:
        return None
    said = reader.test(pyfuncitem.nodeid)
    assert said.status == 0, said.out
    return True


def pytest_collection_finish() -> None:
    """Freeze the imported objects, and let torch's loggers propagate.

    Imported objects that are not frozen cost each garbage collection half a second.
    In each test pytest adds handlers to loggers that do not propagate; torch has sixty.
    """
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def _fixed_lengths() -> None:
    """Set a fixed default draft length: tests must not depend on measured times."""
    from support import usual_length

    usual_length.install()


@pytest.fixture(name="measured", scope="module")
def _measured() -> Iterator[None]:
    from support import usual_length

    usual_length.USUAL = None
    yield
    usual_length.USUAL = 4


@pytest.fixture(autouse=True, scope="session")
def _own_measurements(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the measurements of tests apart from those saved on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("measurements")
        patch.setenv("MLX_SPECULATION_CACHE", str(folder))
        yield


@pytest.fixture(name="reader", scope="session")
def _reader() -> Iterator[Reader]:
    process = Reader()
    yield process
    process.close()


@pytest.fixture(name="usual_layers")
def _usual_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the usual layers for EAGLE heads: the probe of layers takes seconds."""

    def usual(head: Any, model: Any, readings: Any, starts: Any) -> Any:
        return {readings.usual: None}

    home = "mlx_speculation.models.eagle.load.probe_layers"
    monkeypatch.setattr(home, usual)


@pytest.fixture(name="short_probe")
def _short_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_speculation.models.checkpoints import probe_text

    of = partial(probe_text.OwnText.of, steps=8)
    monkeypatch.setattr(probe_text.OwnText, "of", of)


@pytest.fixture(name="commands")
def _commands(monkeypatch: pytest.MonkeyPatch) -> "Commands":
    from support.processes.commands import Commands

    return Commands(monkeypatch)


@pytest.fixture(name="small_demo")
def _small_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command `demo` run the smallest model on two prompts."""
    from mlx_speculation.cli.commands import demo
    from mlx_speculation.demo import DemoPrompt, demo_models

    small = demo_models()["draft"]
    monkeypatch.setattr(demo, "demo_models", lambda: {"dense": small, "draft": small})
    text = "def add(first, second):\n"
    prompts = [DemoPrompt(group, text) for group in ("code", "prose")]
    monkeypatch.setattr(demo, "one_prompt_per_group", lambda: prompts)


@pytest.fixture(name="note_rounds")
def _note_rounds(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    return lambda rounds: record_property("rounds", rounds)


@pytest.fixture(name="hooked", scope="module")
def _hooked() -> Iterator[dict[str, "Mixers"]]:
    from mlx_lm.models import lfm2

    from mlx_speculation.models import ModelHooks
    from support.caches.cache_twins import Mixers
    from support.models.tiny_models import TINY_MODELS, build

    models = {name: build(name) for name in ("qwen3_5", "mamba", "rwkv7")}
    smaller = TINY_MODELS["lfm2"].args | {"hidden_size": 8}
    conv = lfm2.ShortConv(lfm2.ModelArgs.from_dict(smaller), 0)
    owners = [ModelHooks(model) for model in (*models.values(), conv)]
    rwkv7 = models["rwkv7"].model.layers[0]
    yield {
        "lfm2": Mixers("lfm2", [conv], 1, hidden=8),
        "qwen3_5": Mixers("qwen3_5", [models["qwen3_5"].layers[0].linear_attn], 2),
        "mamba": Mixers("mamba", [models["mamba"].backbone.layers[0].mixer], 2),
        "rwkv7": Mixers("rwkv7", [rwkv7.attn, rwkv7.ffn], 3),
    }
    for owner in owners:
        owner.remove()


@pytest.fixture(name="exact_buffers")
def _exact_buffers() -> Iterator[None]:
    """Let mlx allocate a new buffer for every array."""
    old = mx.set_cache_limit(0)
    yield
    mx.set_cache_limit(old)


@pytest.fixture(name="on_the_cpu", scope="module")
def _on_the_cpu() -> Iterator[None]:
    """Compute on the CPU, on machines with CUDA too.

    CUDA rounds float32 products more coarsely, and models/cuda replaces operations that
    models/cpu keeps.
    """
    with mx.stream(mx.cpu):
        yield
