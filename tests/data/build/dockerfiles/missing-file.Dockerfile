FROM alpine:3.20
WORKDIR /app
COPY no-such-file .
RUN echo never
