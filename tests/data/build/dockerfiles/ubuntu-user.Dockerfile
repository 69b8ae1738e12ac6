FROM ubuntu:24.04
MAINTAINER Jane <jane@example.com>
ARG DEBIAN_FRONTEND=noninteractive
RUN apt-get update -y
RUN apt-get install -y git
RUN useradd -ms /bin/bash app
USER app
WORKDIR /home/app
ADD --chown=app:app package.json /home/app/
RUN id -u
CMD ["/bin/bash"]
