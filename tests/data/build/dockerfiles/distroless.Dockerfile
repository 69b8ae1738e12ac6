FROM golang:1.23-alpine AS build
WORKDIR /go/src/app
COPY go.mod go.sum ./
RUN go mod download
COPY main.go .
COPY src ./src
RUN CGO_ENABLED=0 go build -ldflags "-s -w" -o /go/bin/app ./...

FROM gcr.io/distroless/static:nonroot
COPY --from=build /go/bin/app /app
USER nonroot
ENTRYPOINT ["/app"]
