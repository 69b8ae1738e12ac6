"""Image builds: `POST /build`."""
