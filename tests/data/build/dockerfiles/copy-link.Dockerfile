# syntax=docker/dockerfile:1.7
FROM alpine:3.20 AS files
RUN mkdir /out && echo made >/out/file
FROM debian:bookworm-slim
COPY --link --from=files /out /opt/out
COPY --link public /opt/public
COPY src/*.go /opt/src/
