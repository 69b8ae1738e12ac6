FROM alpine:3.20 AS unused
RUN echo never run
FROM alpine:3.20 AS test
COPY src /src
RUN echo tests pass
FROM alpine:3.20
COPY --from=test /src /src
WORKDIR src
RUN ls
