"""Sends Python values between processes: pickled, in shared memory; or explains why it cannot."""
