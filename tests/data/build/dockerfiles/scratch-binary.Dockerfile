FROM golang:1.23-alpine AS build
WORKDIR /src
COPY <<EOF /src/hello.go
package main
EOF
RUN go build -o /bin/hello ./hello.go

FROM scratch
COPY --from=build /bin/hello /bin/hello
CMD ["/bin/hello"]
