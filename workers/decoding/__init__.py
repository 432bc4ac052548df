"""Pure tensor algorithms: noise, warping, verification and stop handling. No Ray, no I/O."""
