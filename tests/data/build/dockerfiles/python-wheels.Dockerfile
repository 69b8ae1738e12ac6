FROM python:3.12-slim AS compile
RUN python3 -m venv /opt/venv
ENV PATH="/opt/venv/bin:$PATH"
COPY requirements.txt .
RUN pip install -r requirements.txt -o /opt/venv/installed

FROM python:3.12-slim AS run
COPY --from=compile /opt/venv /opt/venv
WORKDIR /app
COPY app.py .
ENV PATH="/opt/venv/bin:$PATH"
ENTRYPOINT ["python"]
CMD ["app.py"]
