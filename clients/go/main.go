// Streams a completion and the answer of a chat, aborts a completion, and reads what a refusal says.
//
//	go run . HOST:PORT [CA_FILE TOKEN_FILE]
//
// With CA_FILE and TOKEN_FILE the calls go through TLS and carry the token.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "example.com/generate/stubs/runahead/v1"
)

// Calls are spread over the servers behind a name, and made again after UNAVAILABLE alone, by gRPC itself.
const serviceConfig = `{
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
}`

// bearer goes with each call as the header that it is, through TLS alone.
type bearer string

func (token bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + string(token)}, nil
}

func (bearer) RequireTransportSecurity() bool { return true }

func connect(address, caFile, tokenFile string) (*grpc.ClientConn, error) {
	options := []grpc.DialOption{grpc.WithDefaultServiceConfig(serviceConfig)}
	if caFile == "" || tokenFile == "" {
		options = append(options, grpc.WithTransportCredentials(insecure.NewCredentials()))
		return grpc.NewClient(address, options...)
	}
	tls, err := credentials.NewClientTLSFromFile(caFile, "")
	if err != nil {
		return nil, err
	}
	token, err := os.ReadFile(tokenFile)
	if err != nil {
		return nil, err
	}
	options = append(options,
		grpc.WithTransportCredentials(tls),
		grpc.WithPerRPCCredentials(bearer(strings.TrimSpace(string(token)))))
	return grpc.NewClient(address, options...)
}

// each calls a function with each event of a stream, until it ends.
func each(ctx context.Context, service pb.GenerationServiceClient, request *pb.GenerateRequest,
	handle func(*pb.GenerateResponse) error) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel() // ends a stream that is left before its end, too
	events, err := service.Generate(ctx, request)
	if err != nil {
		return err
	}
	for {
		response, err := events.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := handle(response); err != nil {
			return err
		}
	}
}

var completion = &pb.GenerateRequest{
	Prompt:   &pb.GenerateRequest_Text{Text: "def read_lines(path):\n"},
	Sampling: &pb.SamplingOptions{Temperature: proto.Float32(0)},
	Stopping: &pb.StoppingOptions{MaxTokens: proto.Int32(32)},
}

// The server makes a prompt of the messages, with the model's chat template. A model without one takes no chat.
var chat = &pb.GenerateRequest{
	Prompt: &pb.GenerateRequest_Chat{Chat: &pb.Chat{Messages: []*pb.ChatMessage{
		{Role: proto.String("system"), Content: proto.String("Answer in one sentence.")},
		{Role: proto.String("user"), Content: proto.String("How does Python read the lines of a file?")},
	}}},
	Sampling: &pb.SamplingOptions{Temperature: proto.Float32(0)},
	Stopping: &pb.StoppingOptions{MaxTokens: proto.Int32(32)},
}

// stream prints text as it arrives: accepted comes first, then deltas, and finished last.
func stream(ctx context.Context, service pb.GenerationServiceClient, request *pb.GenerateRequest) error {
	return each(ctx, service, request, func(response *pb.GenerateResponse) error {
		switch event := response.Event.(type) {
		case *pb.GenerateResponse_Delta:
			fmt.Print(event.Delta.Text)
		case *pb.GenerateResponse_Finished:
			fmt.Printf("\nfinished: %v, %d tokens\n", event.Finished.Reason, event.Finished.Usage.CompletionTokens)
		}
		return nil
	})
}

// abort ends a stream by its id, as another process could. To end one's own, cancelling its context does.
func abort(ctx context.Context, service pb.GenerationServiceClient) error {
	request := &pb.GenerateRequest{
		Prompt:   &pb.GenerateRequest_Text{Text: "def main():\n"},
		Stopping: &pb.StoppingOptions{MaxTokens: proto.Int32(2000), IgnoreEos: proto.Bool(true)},
	}
	requestID := ""
	return each(ctx, service, request, func(response *pb.GenerateResponse) error {
		switch event := response.Event.(type) {
		case *pb.GenerateResponse_Accepted:
			requestID = event.Accepted.RequestId
		case *pb.GenerateResponse_Delta:
			if requestID == "" {
				return nil // once is enough; what was on its way still arrives
			}
			ctx, cancel := context.WithTimeout(ctx, time.Minute)
			defer cancel()
			answer, err := service.Abort(ctx, &pb.AbortRequest{RequestIds: []string{requestID}})
			if err != nil {
				return err
			}
			fmt.Printf("abort: %v\n", answer.Results[0].Outcome)
			requestID = ""
		case *pb.GenerateResponse_Finished:
			fmt.Printf("finished: %v\n", event.Finished.Reason)
		}
		return nil
	})
}

// refused asks for what no server gives.
func refused(ctx context.Context, service pb.GenerationServiceClient) error {
	request := &pb.GenerateRequest{
		Prompt:   &pb.GenerateRequest_Text{Text: "x"},
		Stopping: &pb.StoppingOptions{MaxTokens: proto.Int32(0)},
	}
	return each(ctx, service, request, func(*pb.GenerateResponse) error { return nil })
}

// explain prints an error's code and sentence, and the details that say what to do about it.
func explain(err error) {
	failed := status.Convert(err)
	fmt.Printf("refused: %v: %s\n", code.Code(failed.Code()), failed.Message())
	for _, detail := range failed.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			fmt.Printf("  reason %s of %s\n", detail.Reason, detail.Domain)
		case *errdetails.BadRequest:
			for _, violation := range detail.FieldViolations {
				fmt.Printf("  field %s: %s\n", violation.Field, violation.Description)
			}
		case *errdetails.RetryInfo:
			fmt.Printf("  try again in %.1f s\n", detail.RetryDelay.AsDuration().Seconds())
		}
	}
}

func main() {
	arguments := append(os.Args[1:], "", "", "")
	connection, err := connect(arguments[0], arguments[1], arguments[2])
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	service, ctx := pb.NewGenerationServiceClient(connection), context.Background()
	if err := stream(ctx, service, completion); err != nil {
		explain(err)
		os.Exit(1)
	}
	if err := stream(ctx, service, chat); err != nil {
		explain(err)
	}
	if err := abort(ctx, service); err != nil {
		explain(err)
		os.Exit(1)
	}
	explain(refused(ctx, service))
}
