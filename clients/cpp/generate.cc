// Streams a completion and the answer of a chat, aborts a completion, and reads what a refusal says.
//
//     build/generate HOST:PORT [CA_FILE TOKEN_FILE]
//
// With CA_FILE and TOKEN_FILE the calls go through TLS and carry the token.

#include <chrono>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <string>

#include <grpcpp/grpcpp.h>

#include "google/rpc/code.pb.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "runahead/v1/generation_service.grpc.pb.h"

namespace v1 = runahead::v1;
using Service = v1::GenerationService::Stub;

// Calls are spread over the servers behind a name, and made again after UNAVAILABLE alone, by gRPC itself.
constexpr char kServiceConfig[] = R"json({
  "loadBalancingConfig": [{"round_robin": {}}],
  "methodConfig": [{
    "name": [{"service": "runahead.v1.GenerationService"}],
    "retryPolicy": {
      "maxAttempts": 4,
      "initialBackoff": "0.1s",
      "maxBackoff": "2s",
      "backoffMultiplier": 2,
      "retryableStatusCodes": ["UNAVAILABLE"]
    }
  }]
})json";

std::string Read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::shared_ptr<grpc::Channel> Connect(const std::string& address, const std::string& ca_file,
                                       const std::string& token_file) {
  grpc::ChannelArguments arguments;
  arguments.SetServiceConfigJSON(kServiceConfig);
  if (ca_file.empty() || token_file.empty()) {
    return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
  }
  std::string token = Read(token_file);
  token.erase(token.find_last_not_of(" \r\n") + 1);
  auto tls = grpc::SslCredentials({.pem_root_certs = Read(ca_file)});
  auto bearer = grpc::AccessTokenCredentials(token);  // authorization: Bearer TOKEN
  return grpc::CreateCustomChannel(address, grpc::CompositeChannelCredentials(tls, bearer), arguments);
}

// A context belongs to one call.
void WithinAMinute(grpc::ClientContext& context) {
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(1));
}

v1::GenerateRequest Completion() {
  v1::GenerateRequest request;
  request.set_text("def read_lines(path):\n");
  request.mutable_sampling()->set_temperature(0);
  request.mutable_stopping()->set_max_tokens(32);
  return request;
}

// The server makes a prompt of the messages, with the model's chat template. A model without one takes no chat.
v1::GenerateRequest Chat() {
  v1::GenerateRequest request = Completion();
  v1::ChatMessage* message = request.mutable_chat()->add_messages();  // in place of the text
  message->set_role("system");
  message->set_content("Answer in one sentence.");
  message = request.mutable_chat()->add_messages();
  message->set_role("user");
  message->set_content("How does Python read the lines of a file?");
  return request;
}

// Prints text as it arrives: `accepted` comes first, then deltas, and `finished` last.
grpc::Status Stream(Service& service, const v1::GenerateRequest& request) {
  grpc::ClientContext context;
  WithinAMinute(context);
  auto reader = service.Generate(&context, request);
  v1::GenerateResponse response;
  while (reader->Read(&response)) {
    if (response.has_delta()) {
      std::cout << response.delta().text() << std::flush;
    } else if (response.has_finished()) {
      std::cout << "\nfinished: " << v1::FinishReason_Name(response.finished().reason()) << ", "
                << response.finished().usage().completion_tokens() << " tokens" << std::endl;
    }
  }
  return reader->Finish();
}

// Ends a stream by its id, as another process could. To end one's own, `context.TryCancel()` does.
grpc::Status Abort(Service& service) {
  v1::GenerateRequest request;
  request.set_text("def main():\n");
  request.mutable_stopping()->set_max_tokens(2000);
  request.mutable_stopping()->set_ignore_eos(true);

  grpc::ClientContext context;
  WithinAMinute(context);
  auto reader = service.Generate(&context, request);
  v1::GenerateResponse response;
  std::string request_id;
  while (reader->Read(&response)) {
    if (response.has_accepted()) {
      request_id = response.accepted().request_id();
    } else if (response.has_delta() && !request_id.empty()) {
      v1::AbortRequest abort;
      abort.add_request_ids(request_id);
      v1::AbortResponse answer;
      grpc::ClientContext abort_context;
      WithinAMinute(abort_context);
      if (auto status = service.Abort(&abort_context, abort, &answer); !status.ok()) {
        return status;  // and the stream is cancelled with its reader
      }
      std::cout << "abort: " << v1::AbortOutcome_Name(answer.results(0).outcome()) << std::endl;
      request_id.clear();  // once is enough; what was on its way still arrives
    } else if (response.has_finished()) {
      std::cout << "finished: " << v1::FinishReason_Name(response.finished().reason()) << std::endl;
    }
  }
  return reader->Finish();
}

// Asks for what no server gives.
grpc::Status Refused(Service& service) {
  v1::GenerateRequest request;
  request.set_text("x");
  request.mutable_stopping()->set_max_tokens(0);

  grpc::ClientContext context;
  WithinAMinute(context);
  auto reader = service.Generate(&context, request);
  v1::GenerateResponse response;
  while (reader->Read(&response)) {
  }
  return reader->Finish();
}

// Prints an error's code and sentence, and the details that say what to do about it.
void Explain(const grpc::Status& error) {
  google::rpc::Status status;  // of which gRPC's own status is a part
  status.ParseFromString(error.error_details());
  auto code = static_cast<google::rpc::Code>(error.error_code());
  std::cout << "refused: " << google::rpc::Code_Name(code) << ": " << error.error_message() << std::endl;
  for (const auto& packed : status.details()) {
    google::rpc::ErrorInfo info;
    google::rpc::BadRequest bad_request;
    google::rpc::RetryInfo retry;
    if (packed.UnpackTo(&info)) {
      std::cout << "  reason " << info.reason() << " of " << info.domain() << std::endl;
    } else if (packed.UnpackTo(&bad_request)) {
      for (const auto& violation : bad_request.field_violations()) {
        std::cout << "  field " << violation.field() << ": " << violation.description() << std::endl;
      }
    } else if (packed.UnpackTo(&retry)) {
      std::printf("  try again in %.1f s\n", retry.retry_delay().seconds() + retry.retry_delay().nanos() / 1e9);
    }
  }
}

int main(int argc, char** argv) {
  if (argc != 2 && argc != 4) {
    std::cerr << "usage: generate HOST:PORT [CA_FILE TOKEN_FILE]" << std::endl;
    return 2;
  }
  auto channel = Connect(argv[1], argc == 4 ? argv[2] : "", argc == 4 ? argv[3] : "");
  auto service = v1::GenerationService::NewStub(channel);
  auto status = Stream(*service, Completion());
  if (status.ok()) {
    if (auto answer = Stream(*service, Chat()); !answer.ok()) {
      Explain(answer);
    }
    status = Abort(*service);
  }
  if (!status.ok()) {
    Explain(status);
    return 1;
  }
  Explain(Refused(*service));
  return 0;
}
