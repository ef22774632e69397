"""The scale of one fp8 side on a stage: given, or taken from the first rows."""

from dataclasses import dataclass

import torch

from memkv_pp.fp8_scales import calibrated_scale


@dataclass(slots=True)
class Fp8Scale:
    """``value`` is in use; ``calibration_rows`` above 0 means that it is still to be taken.

    Once a row is stored the scale never changes, since the bytes of stored rows mean nothing
    without it.
    """

    value: float = 1.0
    calibration_rows: int = 0

    def fix(self, value: float) -> None:
        """Use ``value``, as for rows that come packed; for a side that holds no rows yet."""
        self.value = value
        self.calibration_rows = 0

    def calibrate(self, records_T: torch.Tensor, values_THD: torch.Tensor) -> None:
        """Take the scale, if it is still to be taken, from the rows that a call stores.

        It is the largest magnitude of the first ``calibration_rows`` of ``values_THD`` whose record
        is not negative, or of all where there are fewer, divided by 448. A call that stores nothing
        leaves it to the next.
        """
        if not self.calibration_rows:
            return
        stored = values_THD[records_T >= 0][: self.calibration_rows]
        if not stored.numel():
            return
        self.fix(calibrated_scale(float(stored.abs().amax())))
