"""What a program in JAX and its port begin from: parameters and data, made by numpy.

``RandomState`` gives the same numbers in all versions of numpy. Parameters are flat dicts. A
kernel of a dense layer is ``[in, out]``, one of a convolution ``[height, width, in, out]`` or, in
the score network, ``[out, in, height, width]``.
"""

import numpy as np

Arrays = dict[str, np.ndarray]

NUM_DEVICES = 4

NUM_CLASSES = 5
BROKEN = 6
"""The step with a broken picture."""
IMAGE_STEPS = 12
BATCH = 8
"""Of each device, here and below."""

SCORE_CALLS, SCORE_STEPS = 2, 8
"""Calls of the training function, and the steps that each runs."""
SCORE_BATCH, SCORE_SIZE = 4, 8


def _normal(rng: np.random.RandomState, *shape: int, fan_in: int) -> np.ndarray:
    return rng.standard_normal(shape) / np.sqrt(fan_in)


def image_params() -> tuple[Arrays, Arrays]:
    """Parameters and batch statistics of a small ResNet, float32."""
    rng = np.random.RandomState(0)
    params: Arrays = {}
    stats: Arrays = {}

    def add(conv: str, norm: str, size: int, num_in: int, num_out: int, scale: float) -> None:
        fan_in = size * size * num_in
        params[f"{conv}.kernel"] = _normal(rng, size, size, num_in, num_out, fan_in=fan_in)
        params[f"{norm}.scale"] = np.full(num_out, scale)
        params[f"{norm}.bias"] = np.zeros(num_out)
        stats[f"{norm}.mean"] = np.zeros(num_out)
        stats[f"{norm}.var"] = np.ones(num_out)

    add("conv", "norm", 3, 3, 8, 1.0)
    for block, num_in, num_out in (("block1", 8, 8), ("block2", 8, 16)):
        add(f"{block}.conv1", f"{block}.norm1", 3, num_in, num_out, 1.0)
        add(f"{block}.conv2", f"{block}.norm2", 3, num_out, num_out, 0.0)  # as in flax's ResNet
        if num_in != num_out:
            add(f"{block}.projection", f"{block}.norm", 1, num_in, num_out, 1.0)
    params["head.kernel"] = _normal(rng, 16, NUM_CLASSES, fan_in=16)
    params["head.bias"] = np.zeros(NUM_CLASSES)
    return _as_float32(params), _as_float32(stats)


def images(num_batches: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Noisy pictures of one class each, ``[batch, device, row, 12, 12, 3]``, and their labels."""
    templates = np.random.RandomState(7).standard_normal((NUM_CLASSES, 12, 12, 3))
    rng = np.random.RandomState(seed)
    labels = rng.randint(0, NUM_CLASSES, (num_batches, NUM_DEVICES, BATCH))
    pictures = templates[labels] + 1.5 * rng.standard_normal((*labels.shape, 12, 12, 3))
    return pictures.astype(np.float32), labels.astype(np.int32)


def training_images() -> tuple[np.ndarray, np.ndarray]:
    """Those of all steps; a picture of one device is broken in one of them."""
    pictures, labels = images(IMAGE_STEPS, seed=5)
    pictures[BROKEN, 2, 0, 0, 0, 0] = np.inf
    return pictures, labels


def score_params() -> Arrays:
    """Parameters of a small convolutional score network, float32."""
    rng = np.random.RandomState(1)
    width, embedding = 8, 16
    params: Arrays = {
        "time1.kernel": _normal(rng, embedding, 32, fan_in=embedding),
        "time1.bias": np.zeros(32),
        "time2.kernel": _normal(rng, 32, 32, fan_in=32),
        "time2.bias": np.zeros(32),
        "first.kernel": _normal(rng, width, 1, 3, 3, fan_in=9),
        "first.bias": np.zeros(width),
        "last.scale": np.ones(width),
        "last.shift": np.zeros(width),
        "last.kernel": 0.1 * _normal(rng, 1, width, 3, 3, fan_in=9 * width),
        "last.bias": np.zeros(1),
    }
    for block in ("block1", "block2"):
        for k in "12":
            params[f"{block}.scale{k}"] = np.ones(width)
            params[f"{block}.shift{k}"] = np.zeros(width)
            params[f"{block}.kernel{k}"] = _normal(rng, width, width, 3, 3, fan_in=9 * width)
            params[f"{block}.bias{k}"] = np.zeros(width)
        params[f"{block}.time.kernel"] = _normal(rng, 32, width, fan_in=32)
        params[f"{block}.time.bias"] = np.zeros(width)
    return _as_float32(params)


def blobs() -> np.ndarray:
    """Pictures of one bright spot in [-1, 1]: ``[call, device, step, row, 1, 8, 8]``, float32."""
    rng = np.random.RandomState(2)
    shape = (SCORE_CALLS, NUM_DEVICES, SCORE_STEPS, SCORE_BATCH, 1, 1, 1)
    place = np.arange(SCORE_SIZE)
    x, y = (rng.uniform(2, 5, shape) for _ in "xy")
    squares = (place - x) ** 2 + (place[:, None] - y) ** 2
    return (2 * np.exp(-squares / 4) - 1).astype(np.float32)


def helium_params() -> Arrays:
    """Parameters of a small FermiNet for two electrons of opposite spin, float64."""
    rng = np.random.RandomState(3)
    one, two, num_determinants = 16, 8, 2
    params: Arrays = {}
    num_one, num_two = 4, 4
    for layer in "12":
        num_in = 3 * num_one + 2 * num_two
        params[f"one{layer}.kernel"] = _normal(rng, num_in, one, fan_in=num_in)
        params[f"one{layer}.bias"] = np.zeros(one)
        params[f"two{layer}.kernel"] = _normal(rng, num_two, two, fan_in=num_two)
        params[f"two{layer}.bias"] = np.zeros(two)
        num_one, num_two = one, two
    for spin in ("up", "down"):
        params[f"{spin}.kernel"] = 0.1 * _normal(rng, one, num_determinants, fan_in=one)
        params[f"{spin}.bias"] = np.ones(num_determinants)
        params[f"{spin}.decay"] = np.array([1.5, 2.0])
    return params


def walkers(per_device: int) -> np.ndarray:
    """Places of two electrons, ``[device, walker, 6]``, float64."""
    return np.random.RandomState(4).standard_normal((NUM_DEVICES, per_device, 6))


def _as_float32(arrays: Arrays) -> Arrays:
    return {name: array.astype(np.float32) for name, array in arrays.items()}
