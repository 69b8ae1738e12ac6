FROM debian:bookworm-slim
ENV LANG C.UTF-8
RUN apt-get update && apt-get install -y --no-install-recommends \
        ca-certificates \
        curl \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /srv
COPY . .
CMD curl --version
