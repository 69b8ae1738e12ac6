FROM gradle:8-jdk21 AS builder
WORKDIR /home/gradle/project
COPY --chown=gradle:gradle . .
RUN gradle bootJar --no-daemon -o build/libs/app.jar

FROM eclipse-temurin:21-jre
RUN addgroup -S spring && adduser -S spring -G spring
USER spring:spring
WORKDIR /opt
COPY --from=builder /home/gradle/project/build/libs/app.jar app.jar
ENTRYPOINT ["java", "-jar", "/opt/app.jar"]
