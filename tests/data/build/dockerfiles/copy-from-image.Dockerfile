FROM python:3.12-slim
COPY --from=ghcr.io/astral-sh/uv:0.5 /usr/bin/uv /usr/local/bin/uv
WORKDIR /app
ENV UV_LINK_MODE=copy
COPY pyproject.toml uv.lock ./
RUN uv sync --frozen --no-install-project
COPY . .
RUN uv sync --frozen
EXPOSE 8000
CMD ["uv", "run", "app.py"]
