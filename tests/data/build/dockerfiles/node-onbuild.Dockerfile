FROM node:onbuild
EXPOSE 8888
RUN echo after the triggers
