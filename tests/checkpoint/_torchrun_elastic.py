"""Started by torchrun in tests/checkpoint/test_checkpoint.py: a training that is killed once,
and resumes.
"""

import os
import signal
import sys
from pathlib import Path

import torch

import torchpmap as tp

NUM_STEPS, SAVE_EVERY, KILLED_AT = 10, 3, 8


def step(params, state, x, y):
    def loss(params):
        noise = 0.1 * torch.randn(x.shape)
        return (((x + noise) @ params["w"] + params["b"] - y) ** 2).mean()

    value, grads = tp.pmean(tp.value_and_grad(loss)(params), "i")
    params, state = optimizer.update(grads, state, params)
    return params, state, value


optimizer = tp.optim.functional(torch.optim.Adam, lr=0.1)
train = tp.pmap(
    step,
    axis_name="i",
    in_axes=(None, None, 0, 0),
    out_axes=None,
    donate_argnums=(0, 1),
    compile={"backend": "eager"},
)


def data(k):
    generator = torch.Generator().manual_seed(1000 * k + tp.process_index())
    x = torch.randn(1, 8, 3, generator=generator)
    return x, x.sum(-1)


def run(folder, log, *, is_killed):
    torch.manual_seed(0)
    params = {"w": torch.zeros(3), "b": torch.zeros(())}
    tree = {"params": params, "state": optimizer.init(params), "step": 0}
    tree["rng"] = torch.get_rng_state()
    found = tp.checkpoint.latest(folder)
    if found is not None:
        tree = tp.checkpoint.load(found, like=tree)
        torch.set_rng_state(tree["rng"])
    params, state, first = tree["params"], tree["state"], tree["step"]
    saving = None
    lines = [f"start {first}"]
    for k in range(first, NUM_STEPS):
        if k == KILLED_AT and is_killed and tp.process_index() == 1:
            assert saving is not None
            saving.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        params, state, value = train(params, state, *data(k))
        lines.append(f"{k} {float(value).hex()}")
        if tp.process_index() == 0:
            log.write_text("\n".join(lines))
        if (k + 1) % SAVE_EVERY == 0:
            tree = {"params": params, "state": state, "step": k + 1}
            tree["rng"] = torch.get_rng_state()
            saving = tp.checkpoint.save(folder / f"step_{k + 1}", tree, asynchronous=True)


if __name__ == "__main__":
    root = Path(sys.argv[1])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    run(root / "killed", root / f"attempt_{attempt}", is_killed=attempt == 0)
    run(root / "whole", root / "uninterrupted", is_killed=False)
