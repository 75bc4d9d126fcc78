"""A picture of a study: throughput, pool use and recomputation by run. Needs matplotlib, of the extra `bench`."""

from __future__ import annotations

from sparsespec.core.errors import InvalidValueError, UnsupportedError
from sparsespec.plan.study import Study


def save_plot(study: Study, path: str) -> None:
    """Write the picture; its format follows the file's ending. Raises UnsupportedError without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise UnsupportedError("plot", path, "matplotlib is not installed", "Install sparsespec[bench]") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    runs = [r for group in study.groups.values() for r in group]
    names = [r.name for r in runs]
    figures = {"output tokens/s": [r.throughput for r in runs],
               "pool use, %": [100 * (r.pool_use if r.pool_use_loaded is None else r.pool_use_loaded) for r in runs],
               "recomputed tokens for 100 output tokens": [100 * r.recomputed_share for r in runs]}
    figure, axes = plt.subplots(1, len(figures), figsize=(14, 1.5 + 0.35 * len(runs)), sharey=True, layout="constrained")
    for axis, (title, values) in zip(axes, figures.items(), strict=True):
        bars = axis.barh(range(len(runs)), values)
        axis.bar_label(bars, fmt="%.4g", padding=2)
        axis.set_title(title)
        axis.margins(x=0.15)
        axis.set_yticks(range(len(runs)), names)
    axes[0].invert_yaxis()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as e:
        raise InvalidValueError("plot", path, f"cannot be written ({e})", "Give a file such as plan.png") from None
    finally:
        plt.close(figure)
