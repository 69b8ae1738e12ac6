FROM ruby:3.3-slim AS base
WORKDIR /rails
ENV RAILS_ENV="production" \
    BUNDLE_PATH="/usr/local/bundle"

FROM base AS build
RUN apt-get update -qq && apt-get install --no-install-recommends -y build-essential git
COPY Gemfile Gemfile.lock ./
RUN bundle install && \
    rm -rf ~/.bundle/
COPY . .
RUN SECRET_KEY_BASE_DUMMY=1 bundle exec rails assets:precompile

FROM base
COPY --from=build /usr/local/bundle /usr/local/bundle
COPY --from=build /rails /rails
RUN useradd rails --create-home --shell /bin/bash
USER 1000:1000
ENTRYPOINT ["/rails/docker-entrypoint.sh"]
EXPOSE 3000
CMD ["./bin/rails", "server"]
