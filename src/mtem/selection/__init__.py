"""Choosing and trusting without target labels: criteria, calibration, the accuracy estimate, warnings, class shares."""
