// Streams a completion and the answer of a chat, aborts a completion, and reads what a refusal says.
//
//     java Generate HOST:PORT [CA_FILE TOKEN_FILE]
//
// With CA_FILE and TOKEN_FILE the calls go through TLS and carry the token.

import com.google.protobuf.Any;
import com.google.protobuf.util.Durations;
import com.google.rpc.BadRequest;
import com.google.rpc.Code;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import io.grpc.ChannelCredentials;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.StatusRuntimeException;
import io.grpc.TlsChannelCredentials;
import io.grpc.protobuf.StatusProto;
import io.grpc.stub.MetadataUtils;
import java.io.File;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.concurrent.TimeUnit;
import runahead.v1.AbortRequest;
import runahead.v1.Chat;
import runahead.v1.ChatMessage;
import runahead.v1.Finished;
import runahead.v1.GenerateRequest;
import runahead.v1.GenerateResponse;
import runahead.v1.GenerationServiceGrpc;
import runahead.v1.GenerationServiceGrpc.GenerationServiceBlockingStub;
import runahead.v1.SamplingOptions;
import runahead.v1.StoppingOptions;

public final class Generate {
  // Calls are spread over the servers behind a name, and made again after UNAVAILABLE alone, by gRPC itself. This is the
  // JSON of a service config as maps, in which each number is a double.
  private static final Map<String, ?> SERVICE_CONFIG =
      Map.of(
          "loadBalancingConfig", List.of(Map.of("round_robin", Map.of())),
          "methodConfig",
              List.of(
                  Map.of(
                      "name", List.of(Map.of("service", "runahead.v1.GenerationService")),
                      "retryPolicy",
                          Map.of(
                              "maxAttempts", 4.0,
                              "initialBackoff", "0.1s",
                              "maxBackoff", "2s",
                              "backoffMultiplier", 2.0,
                              "retryableStatusCodes", List.of("UNAVAILABLE")))));

  private static final Metadata.Key<String> AUTHORIZATION =
      Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER);

  private static final GenerateRequest COMPLETION =
      GenerateRequest.newBuilder()
          .setText("def read_lines(path):\n")
          .setSampling(SamplingOptions.newBuilder().setTemperature(0))
          .setStopping(StoppingOptions.newBuilder().setMaxTokens(32))
          .build();

  /** The server makes a prompt of the messages, with the model's chat template. */
  private static final GenerateRequest CHAT =
      COMPLETION.toBuilder()
          .setChat( // in place of the text
              Chat.newBuilder()
                  .addMessages(ChatMessage.newBuilder().setRole("system").setContent("Answer in one sentence."))
                  .addMessages(
                      ChatMessage.newBuilder()
                          .setRole("user")
                          .setContent("How does Python read the lines of a file?")))
          .build();

  private final GenerationServiceBlockingStub service;

  private Generate(GenerationServiceBlockingStub service) {
    this.service = service;
  }

  public static void main(String[] arguments) throws Exception {
    boolean secure = arguments.length == 3;
    ChannelCredentials credentials =
        secure
            ? TlsChannelCredentials.newBuilder().trustManager(new File(arguments[1])).build()
            : InsecureChannelCredentials.create();
    ManagedChannel channel =
        Grpc.newChannelBuilder(arguments[0], credentials).defaultServiceConfig(SERVICE_CONFIG).enableRetry().build();
    GenerationServiceBlockingStub service = GenerationServiceGrpc.newBlockingStub(channel);
    if (secure) {
      Metadata headers = new Metadata();
      headers.put(AUTHORIZATION, "Bearer " + Files.readString(Path.of(arguments[2])).strip());
      service = service.withInterceptors(MetadataUtils.newAttachHeadersInterceptor(headers));
    }
    try {
      Generate example = new Generate(service);
      example.stream(COMPLETION);
      example.chat();
      example.abort();
      example.refused();
    } catch (StatusRuntimeException error) {
      explain(error);
      System.exit(1);
    } finally {
      channel.shutdownNow().awaitTermination(5, TimeUnit.SECONDS);
    }
  }

  /** A deadline is a moment, so each call is given one of its own. */
  private GenerationServiceBlockingStub withinAMinute() {
    return service.withDeadlineAfter(1, TimeUnit.MINUTES);
  }

  /** Prints text as it arrives: `accepted` comes first, then deltas, and `finished` last. */
  private void stream(GenerateRequest request) {
    Iterator<GenerateResponse> responses = withinAMinute().generate(request);
    while (responses.hasNext()) {
      GenerateResponse response = responses.next();
      if (response.hasDelta()) {
        System.out.print(response.getDelta().getText());
        System.out.flush();
      } else if (response.hasFinished()) {
        Finished finished = response.getFinished();
        System.out.printf(
            "%nfinished: %s, %d tokens%n", finished.getReason(), finished.getUsage().getCompletionTokens());
      }
    }
  }

  /** Streams the answer of a chat. A model without a chat template takes none. */
  private void chat() {
    try {
      stream(CHAT);
    } catch (StatusRuntimeException error) {
      explain(error);
    }
  }

  /** Ends a stream by its id, as another process could. To end one's own, cancelling its io.grpc.Context does. */
  private void abort() {
    GenerateRequest request =
        GenerateRequest.newBuilder()
            .setText("def main():\n")
            .setStopping(StoppingOptions.newBuilder().setMaxTokens(2000).setIgnoreEos(true))
            .build();
    Iterator<GenerateResponse> responses = withinAMinute().generate(request);
    String requestId = "";
    while (responses.hasNext()) {
      GenerateResponse response = responses.next();
      if (response.hasAccepted()) {
        requestId = response.getAccepted().getRequestId();
      } else if (response.hasDelta() && !requestId.isEmpty()) {
        AbortRequest abort = AbortRequest.newBuilder().addRequestIds(requestId).build();
        System.out.printf("abort: %s%n", withinAMinute().abort(abort).getResults(0).getOutcome());
        requestId = ""; // once is enough; what was on its way still arrives
      } else if (response.hasFinished()) {
        System.out.printf("finished: %s%n", response.getFinished().getReason());
      }
    }
  }

  /** Asks for what no server gives. */
  private void refused() {
    GenerateRequest request =
        GenerateRequest.newBuilder().setText("x").setStopping(StoppingOptions.newBuilder().setMaxTokens(0)).build();
    try {
      withinAMinute().generate(request).forEachRemaining(response -> {});
    } catch (StatusRuntimeException error) {
      explain(error);
    }
  }

  /** Prints an error's code and sentence, and the details that say what to do about it. */
  private static void explain(StatusRuntimeException error) {
    com.google.rpc.Status status = StatusProto.fromThrowable(error);
    System.out.printf("refused: %s: %s%n", Code.forNumber(status.getCode()), status.getMessage());
    try {
      for (Any detail : status.getDetailsList()) {
        if (detail.is(ErrorInfo.class)) {
          ErrorInfo info = detail.unpack(ErrorInfo.class);
          System.out.printf("  reason %s of %s%n", info.getReason(), info.getDomain());
        } else if (detail.is(BadRequest.class)) {
          for (BadRequest.FieldViolation violation : detail.unpack(BadRequest.class).getFieldViolationsList()) {
            System.out.printf("  field %s: %s%n", violation.getField(), violation.getDescription());
          }
        } else if (detail.is(RetryInfo.class)) {
          double seconds = Durations.toMillis(detail.unpack(RetryInfo.class).getRetryDelay()) / 1e3;
          System.out.printf("  try again in %.1f s%n", seconds);
        }
      }
    } catch (com.google.protobuf.InvalidProtocolBufferException broken) {
      System.out.println("  its details can't be read: " + broken.getMessage());
    }
  }
}
