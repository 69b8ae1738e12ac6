"""Log servers for tests: real ones, and own receivers that fail in ways that real ones do rarely.

`syslog.py`: rsyslog and syslog-ng. `journal.py`: systemd's journal in a mount namespace of its own.
`fluentd.py`: a server of Fluentd's protocol. `streams.py`, `gelf.py`, `forward.py`: own receivers.

The programs are those of `.ci/targets` and `.ci/clients`. Everything listens on loopback or in the
test's directory, and is ended by its pid.
"""
