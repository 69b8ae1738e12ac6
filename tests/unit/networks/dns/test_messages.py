"""DNS messages compared with dnslib, an independent implementation, and with random bytes."""

from __future__ import annotations

import ipaddress
import struct

import dnslib
import pytest
from dnslib import EDNS0, QTYPE, RCODE, RR, DNSHeader, DNSLabel, DNSQuestion, DNSRecord
from hypothesis import given
from hypothesis import strategies as st

from engine.networks.dns import messages as dns

LABELS = st.binary(min_size=1, max_size=20)
NAMES = st.lists(LABELS, min_size=1, max_size=6)


def question(name: str = "web", kind: str = "A", *, size: int = 0, **edns: int) -> bytes:
    record = DNSRecord.question(name, kind)
    record.header.id = 0x1234
    if size:
        record.add_ar(EDNS0(udp_len=size, **edns))  # type: ignore[arg-type]
    return record.pack()


def refused(message: bytes) -> DNSRecord | None:
    with pytest.raises(dns.Malformed) as caught:
        dns.parse(message)
    return None if caught.value.reply is None else DNSRecord.parse(caught.value.reply)


# --- queries --------------------------------------------------------------------------------------


def test_a_plain_query() -> None:
    query = dns.parse(question("Web.MyNet", "AAAA"))
    assert (query.id, query.name, query.type, query.class_) == (0x1234, b"\x03web\x05mynet", dns.AAAA, dns.IN)
    assert query.section == b"\x03Web\x05MyNet\0\0\x1c\0\x01"
    assert (query.edns, query.size) == (None, 512)


def test_the_root() -> None:
    assert dns.parse(question(".", "NS")).name == b""


def test_edns() -> None:
    assert dns.parse(question(size=1232)).size == 1232
    assert dns.parse(question(size=100)).size == 512
    assert dns.parse(question(size=65535)).size == 4096
    query = dns.parse(question(size=1400, flags="do"))
    assert query.edns == 0x8000
    reply = DNSRecord.parse(dns.answer(query, ()))
    assert reply.ar[0].rtype == QTYPE.OPT and reply.ar[0].edns_do == 1
    assert not DNSRecord.parse(dns.answer(dns.parse(question()), ())).ar


def test_a_newer_edns_is_bad_version() -> None:
    reply = refused(question(size=1400, version=1))
    assert reply is not None
    assert reply.header.rcode | reply.ar[0].edns_rcode << 4 == dns.BAD_VERSION


def test_edns_behind_other_records() -> None:
    record = DNSRecord.parse(question())
    record.add_auth(*RR.fromZone("web 60 IN NS a.root"))
    record.add_ar(*RR.fromZone("a.root 60 IN A 1.2.3.4"))
    record.add_ar(EDNS0(udp_len=900))
    assert dns.parse(record.pack()).size == 900


def test_two_opts_are_one_too_many() -> None:
    record = DNSRecord.parse(question(size=900))
    record.add_ar(EDNS0(udp_len=1000))
    reply = refused(record.pack())
    assert reply is not None and reply.header.rcode == RCODE.FORMERR


def test_what_is_no_query_gets_silence() -> None:
    assert refused(b"") is None
    assert refused(question()[:11]) is None
    assert refused(dns.answer(dns.parse(question()), ())) is None


def test_other_opcodes_are_not_implemented() -> None:
    message = bytearray(question())
    message[2] |= 5 << 3
    reply = refused(bytes(message))
    assert reply is not None
    assert (reply.header.rcode, reply.header.opcode, reply.header.id) == (RCODE.NOTIMP, 5, 0x1234)


@pytest.mark.parametrize("count", [0, 2, 65535])
def test_lies_about_questions(count: int) -> None:
    reply = refused(question()[:4] + struct.pack("!H", count) + question()[6:])
    assert reply is not None and reply.header.rcode == RCODE.FORMERR


@pytest.mark.parametrize("field", [6, 8, 10])
def test_lies_about_records(field: int) -> None:
    message = question()
    reply = refused(message[:field] + b"\xff\xff" + message[field + 2 :])
    assert reply is not None and reply.header.rcode == RCODE.FORMERR


def test_every_cut_is_refused() -> None:
    message = question("web.mynet", size=1232)
    for length in range(12, len(message)):
        reply = refused(message[:length])
        assert reply is not None and reply.header.rcode == RCODE.FORMERR


@pytest.mark.parametrize(
    "name", [b"\xc0\x0c", b"\x03web\xc0\x0c", b"\x03web\xc0\x10", b"\x40" + b"a" * 64 + b"\0", b"\xff\0"]
)
def test_pointers_and_long_labels_in_a_question(name: bytes) -> None:
    assert refused(question()[:12] + name + b"\0\1\0\1") is not None


def test_names_have_255_octets_at_most() -> None:
    longest = [b"a" * 63] * 3 + [b"a" * 61]
    name = b"".join(bytes((len(label),)) + label for label in longest)
    assert len(name) == 254
    assert dns.parse(question()[:12] + name + b"\0\0\1\0\1").name == name
    assert refused(question()[:12] + name[:-62] + b"\x3e" + b"a" * 62 + b"\0\0\1\0\1") is not None


@given(st.binary(max_size=200))
def test_noise(message: bytes) -> None:
    try:
        query = dns.parse(message)
    except dns.Malformed as error:
        assert error.reply is None or DNSHeader.parse(dnslib.DNSBuffer(error.reply)).id == int.from_bytes(
            message[:2], "big"
        )
    else:
        assert query.section in message
        assert query.name == query.section[:-5].lower()


@given(st.binary(max_size=120), st.integers(0, 3), st.integers(0, 3), st.integers(0, 3))
def test_noise_behind_a_good_head(tail: bytes, answers: int, authorities: int, additional: int) -> None:
    message = struct.pack("!6H", 7, 0x0100, 1, answers, authorities, additional) + tail
    try:
        assert dns.parse(message).id == 7
    except dns.Malformed as error:
        assert error.reply is not None and error.reply[:2] == b"\0\x07"


@given(NAMES, st.integers(0, 65535), st.integers(0, 65535), st.binary(max_size=8))
def test_any_name_comes_back_as_it_was(labels: list[bytes], kind: int, number: int, tail: bytes) -> None:
    record = DNSRecord(DNSHeader(id=number, rd=1), q=DNSQuestion(DNSLabel(labels), kind))
    message = record.pack()
    query = dns.parse(message + tail)
    assert (query.id, query.type, query.section) == (number, kind, message[12:])
    assert dns.answer(query, ())[12:] == query.section


# --- answers --------------------------------------------------------------------------------------


def test_addresses() -> None:
    query = dns.parse(question("Web"))
    records = [dns.address_record(ipaddress.ip_address(each).packed, 5) for each in ("10.0.0.2", "fd00::2")]
    reply = DNSRecord.parse(dns.answer(query, records))
    assert str(reply.q.qname) == "Web."
    assert [(str(rr.rname), rr.rtype, rr.ttl, str(rr.rdata)) for rr in reply.rr] == [
        ("Web.", QTYPE.A, 5, "10.0.0.2"),
        ("Web.", QTYPE.AAAA, 5, "fd00::2"),
    ]
    header = reply.header
    assert (header.qr, header.aa, header.tc, header.rd, header.ra, header.rcode) == (1, 1, 0, 1, 1, 0)


def test_a_pointer() -> None:
    query = dns.parse(question("2.0.0.10.in-addr.arpa", "PTR"))
    reply = DNSRecord.parse(dns.answer(query, [dns.pointer_record(b"\x03web\x05mynet", 5)]))
    assert str(reply.a.rdata) == "web.mynet."


@given(st.integers(0, 300), st.sampled_from([0, 512, 700, 1232, 4096]))
def test_what_does_not_fit_is_cut_at_a_record_and_says_so(count: int, size: int) -> None:
    query = dns.parse(question("web", size=size))
    records = [dns.address_record(number.to_bytes(4, "big"), 5) for number in range(count)]
    message = dns.answer(query, records, limit=query.size)
    assert len(message) <= query.size
    reply = DNSRecord.parse(message)
    assert [rr.rdata.data for rr in reply.rr] == [tuple(number.to_bytes(4, "big")) for number in range(len(reply.rr))]
    assert reply.header.tc == (len(reply.rr) < count)
    assert len(reply.ar) == bool(size)
    assert len(DNSRecord.parse(dns.answer(query, records)).rr) == count


# --- forwarding -----------------------------------------------------------------------------------


def reply_of_others(**changes: int) -> bytes:
    record = DNSRecord.parse(question("Example.com")).reply()
    record.add_answer(*RR.fromZone("example.com 60 IN A 1.2.3.4"))
    for name, value in changes.items():
        setattr(record.header, name, value)
    return record.pack()


def test_the_answer_to_a_question() -> None:
    query = dns.parse(question("example.COM"))
    reply = reply_of_others()
    assert dns.answers(reply, 0x1234, query)
    assert not dns.answers(reply, 0x1235, query)
    assert not dns.answers(reply_of_others(qr=0), 0x1234, query)
    assert not dns.answers(reply_of_others(opcode=4), 0x1234, query)
    for other in (
        question("example.org"),
        question("example.com", "AAAA"),
        question("www.example.com"),
        question("com"),
    ):
        assert not dns.answers(reply, 0x1234, dns.parse(other))
    for length in range(len(question("example.com"))):
        assert not dns.answers(reply[:length], 0x1234, query)


def test_a_refusal_without_the_question() -> None:
    query = dns.parse(question())
    for rcode in range(16):
        bare = DNSHeader(id=0x1234, qr=1, rcode=rcode, q=0)
        buffer = dnslib.DNSBuffer()
        bare.pack(buffer)
        assert dns.answers(bytes(buffer.data), 0x1234, query) == (rcode in (1, 2, 4, 5))


@given(st.binary(max_size=60))
def test_noise_answers_nothing(tail: bytes) -> None:
    query = dns.parse(question("a-name.that.noise.does.not.have"))
    assert not dns.answers(b"\x12\x34\x81\x80\0\1\0\1\0\0\0\0" + tail, 0x1234, query)


def test_another_id() -> None:
    assert dns.with_id(question(), 7) == b"\0\7" + question()[2:]
    assert dns.rcode(dns.answer(dns.parse(question()), (), rcode=dns.NAME_ERROR)) == dns.NAME_ERROR


# --- names ----------------------------------------------------------------------------------------


def test_encoded() -> None:
    assert dns.encoded("Web.mynet.") == b"\x03web\x05mynet"
    assert dns.encoded("a" * 63) is not None
    for wrong in ("", ".", "a..b", ".a", "a" * 64, ".".join(["a" * 60] * 5)):
        assert dns.encoded(wrong) is None


@given(st.ip_addresses())
def test_addresses_back(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    name = dns.encoded(address.reverse_pointer)
    assert name is not None
    assert dns.address_of(name) == address.packed


@pytest.mark.parametrize(
    "text",
    [
        "in-addr.arpa",
        "1.in-addr.arpa",
        "1.2.3.4.5.in-addr.arpa",
        "256.0.0.1.in-addr.arpa",
        "x.0.0.1.in-addr.arpa",
        "ip6.arpa",
        "1.ip6.arpa",
        ".".join("0" * 31) + ".g.ip6.arpa",
        ".".join("0" * 31) + ".00.ip6.arpa",
        "web",
    ],
)
def test_names_that_are_no_address(text: str) -> None:
    name = dns.encoded(text)
    assert name is not None and dns.address_of(name) is None


@given(st.binary(max_size=80), st.sampled_from([b"\x07in-addr\x04arpa", b"\x03ip6\x04arpa"]))
def test_noise_is_no_address(noise: bytes, zone: bytes) -> None:
    assert len(dns.address_of(noise + zone) or b"") in (0, 4, 16)


@given(
    st.sampled_from([b"web", b"a.b", b"www.example.org", b"x" * 63, b"4.3.2.1.in-addr.arpa"]),
    st.sampled_from(["A", "AAAA", "PTR", "ANY", "TXT"]),
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4),
    st.integers(0, 40),
)
def test_mutated_queries(name: bytes, kind: str, edns: bool, changes: list[tuple[int, int]], cut: int) -> None:
    """Mutated queries: an accepted one is read as dnslib reads it, all others are refused."""
    record = DNSRecord.question(name.decode(), kind)
    if edns:
        record.add_ar(EDNS0(udp_len=1232))
    message = bytearray(record.pack())
    for at, value in changes:
        message[at % len(message)] = value
    text = bytes(message[: len(message) - cut] if cut < 20 else message)
    try:
        query = dns.parse(text)
    except dns.Malformed as error:
        assert error.reply is None or len(error.reply) >= 12
        return
    if not query.name.isascii():
        return  # dnslib refuses such labels; to DNS they are ordinary octets
    buffer = dnslib.DNSBuffer(text)
    number = DNSHeader.parse(buffer).id
    asked = DNSQuestion.parse(buffer)
    assert (query.id, query.type) == (number, asked.qtype)
    labels = b"".join(bytes((len(each),)) + each.lower() for each in asked.qname.label)
    assert query.name == labels
