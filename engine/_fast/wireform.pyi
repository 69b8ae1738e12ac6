from array import array

# text
RAW: int  # unescaped bytes
JSON: int  # the inside of a JSON string; the quotes are parts of `middle` and `tail`
MSGPACK_STR: int  # a MessagePack str
JOURNAL: int  # the field MESSAGE of journald's native protocol, with its newline

# time
NO_TIME: int
STAMP: int  # `Jan _2 15:04:05`, local (RFC 3164 4.1.2)
RFC3339: int  # `2006-01-02T15:04:05+07:00` or `…Z`, local
RFC3339_MICRO: int  # with six digits of the second, local (RFC 5424 6.2.3)
RFC3339_NANO: int  # UTC, up to nine digits, without trailing zeros
MILLIS_FRACTION: int  # `1234567890.123`, without trailing zeros (GELF)
MICROS_FRACTION: int  # `1234567890.123456`, rounded
EVENT_TIME: int  # Fluentd's MessagePack extension 0
SECONDS_INT: int  # a MessagePack unsigned integer
MILLIS: int  # `1234567890123`

# frame
LINE: int  # a newline after each message (RFC 6587 3.4.2)
NUL: int  # a zero byte after each message
COUNT: int  # `SIZE SPACE` before each message (RFC 6587 3.4.1, RFC 5425 4.3)
CONCATENATED: int  # nothing
DATAGRAM: int  # nothing, and `format` returns the ends of the messages

# partial
NO_PARTIAL: int
FLUENTD: int  # partial_message, partial_id, partial_ordinal, partial_last: four pairs of a map
JOURNALD: int  # CONTAINER_LOG_ORDINAL, and CONTAINER_PARTIAL_… for parts

State = tuple[int, int, int, int]

class Form:
    state: State
    def __init__(
        self,
        *,
        text: int,
        time: int,
        frame: int,
        head: tuple[bytes, bytes],
        middle: tuple[bytes, bytes],
        tail: tuple[bytes, bytes],
        part_middle: tuple[bytes, bytes] | None = None,
        skip_empty: bool = False,
        skip_blank: bool = False,
        partial: int = ...,
        longest: int = 0,
    ) -> None: ...
    # (wire, bytes consumed of the block, entries consumed, ends of the messages, messages)
    def format(self, block: bytes, start: int, number: int, room: int) -> tuple[bytes, int, int, array[int], int]: ...

# ([(stream, time in ns, text, ends with a newline)], bytes consumed of the block, entries consumed)
def entries(block: bytes, start: int, room: int) -> tuple[list[tuple[int, int, bytes, bool]], int, int]: ...
