/**
 * What Gati's services say to each other. Messages are framed and in the binary protocol; several calls may be
 * under way on one connection, their answers come in any order and are told apart by the sequence number.
 *
 * Fields are only ever added, with new numbers, and new ones are optional: older and newer services understand
 * each other. `make thrift` writes the Python code into services/wire/gen.
 */
namespace py services.wire.gen

/** Why a call was refused; every error of the library and every reply of the REST front end has one. */
enum ErrorCode {
  /** The request is wrong in itself: shape, datatype, values. */
  INVALID_ARGUMENT = 1
  /** No such model, version or pipeline. */
  NOT_FOUND = 2
  /** The request is right, but not in this state. */
  FAILED_PRECONDITION = 3
  /** Too much is waiting: the latency SLO would be missed, or the queue is full. */
  RESOURCE_EXHAUSTED = 4
  /** Not loaded yet, draining, or gone. */
  UNAVAILABLE = 5
  /** The time remaining has passed. */
  DEADLINE_EXCEEDED = 6
  /** The caller cancelled the request, or went away. */
  CANCELLED = 7
  /** A mistake in the service itself. */
  INTERNAL = 8
}

/** A refusal that the caller can act on. */
exception ServiceError {
  1: required ErrorCode code
  /** One line: what was wrong, where, what to do. */
  2: required string message
  /** When to try again; given with RESOURCE_EXHAUSTED and UNAVAILABLE. */
  3: optional i32 retry_after_ms
}

/** An array, row-major and little-endian; of BYTES each element follows its length, four bytes. */
struct Tensor {
  /** As in the Open Inference Protocol: FP32, UINT8, INT64, BYTES. */
  1: required string datatype
  2: required list<i64> shape
  3: required binary data
}

/** One or more inputs of the same shape, to be answered together. */
struct InferRequest {
  /** Names this request when it is cancelled; unique among those under way. */
  1: required string request_id
  /** FP32 [batch, ...] as the network takes it, UINT8 images, or BYTES [batch]: UTF-8 text, WAV or FLAC files. */
  2: required Tensor input
  /** Milliseconds after which the client no longer waits for the answer. */
  3: required i32 time_remaining_ms
  /** Of the W3C trace context, 32 hexadecimal digits. */
  4: required string trace_id
  /** 1 is served first. */
  5: optional i32 priority = 2
  /** Milliseconds within which the answer is wanted: refused at once when that cannot be. */
  6: optional double latency_slo_ms
  /** A loaded version; the active one if absent. */
  7: optional string version
  /**
   * What the inputs show, where that is one thing over time, as a camera: answers of the base model are
   * remembered for it. Absent: memory is not used, nor where a version is named.
   */
  8: optional string place
}

/** What became of one input. */
struct Answer {
  1: required i32 class_index
  /** Class probabilities, FP32 little-endian. */
  2: required binary probabilities
  /** The block after which it was known, "base", or "recall" from memory. */
  3: required string exit
}

/** The answers to a request, in the order of its inputs, all of one version. */
struct InferResponse {
  1: required list<Answer> answers
  2: required string version
  /** From arrival until the last of its inputs was taken up. */
  3: required double queue_ms
  /** From arrival to the last answer. */
  4: required double latency_ms
  /** Whether the caches of that version answered; see VersionInfo. */
  5: optional string state
  /** What is promised of these answers, in a sentence. */
  6: optional string promise
  // 7 was a flag: whether that rests on the certificate of the version
  /** The certificate that it rests on, by the `certificate_id` of the version; absent where audits prove it. */
  8: optional string certificate_id
}

/** What a version of a model is made from. */
struct VersionSource {
  /** What the version will be called. */
  1: required string version
  /** A composition of the model's cache library; absent: the base model without caches. */
  2: optional string composition
  /** A folder with a published version, as the model repository holds it. */
  3: optional string folder
}

/** Audits of a proof under way: of what caches would have answered that do not answer yet. */
struct ProofProgress {
  1: required i64 audits
  2: required i64 losses
  /** About how many audits complete it, if none is a loss. */
  3: required i64 needed
}

/** A loaded version. */
struct VersionInfo {
  1: required string version
  2: required bool active
  3: required string backend
  /** The certificate in JSON; absent where nothing is certified, and of versions that were retrained. */
  4: optional string certificate_json
  5: required list<string> exits
  6: required i64 memory_bytes
  /**
   * "serving": its caches answer. "probation": the base model answers until they are proven. "stopped": so it
   * does since the guard stopped them. "unguarded": they answer, and nothing is promised.
   */
  7: optional string state
  /** It was activated and takes over by itself as soon as it is proven. */
  8: optional bool pending
  /** The agreement that is promised of it; absent where nothing is. */
  9: optional double agreement
  /** What is promised of its answers, in a sentence. */
  10: optional string promise
  11: optional ProofProgress proof
  /** Audits of answers that its caches or network gave, and how many differed from the base model's. */
  12: optional i64 audits
  13: optional i64 losses
  /** Its settings go from strict to loose: how many there are, and how many of them may answer. */
  14: optional i32 settings
  15: optional i32 level
  /** Lookups are left out for a while, for they cost more than they save. */
  16: optional bool resting
  /** The agreement that is promised, or to be proven. */
  17: optional double target
  /** What it was loaded from; absent from services that do not tell. */
  18: optional VersionSource source
  /** Identifies the certificate: another composition may be loaded under the same name. */
  19: optional string certificate_id
}

/** One array that a network takes. */
struct InputArray {
  1: required string name
  /** As the Open Inference Protocol calls it. */
  2: required string datatype
  /** Of one input, without the batch. */
  3: required list<i64> shape
  /** A last axis that is shorter will do: it is padded with zeros, which the network's mask leaves out. */
  4: optional bool shorter
}

/** How a model turns text into what its network takes. */
struct TextInput {
  /** Of the tokenizer's file. */
  1: required string tokenizer_sha256
  /** Longer texts are cut, in tokens. */
  2: required i32 length
}

/** The recordings that a model takes. */
struct SoundInput {
  /** In hertz; nothing is resampled. */
  1: required i32 sample_rate
  /** Longer recordings are cut. */
  2: required double seconds
}

/** What a model takes and gives. */
struct ModelInfo {
  1: required string name
  /** Of one input, without the batch. */
  2: required list<i64> input_shape
  3: required i32 classes
  4: optional list<string> class_names
  /** Height, width and channels of images, 0 where any will do; no channels where it takes no images. */
  5: required list<i64> image_shape
  6: required i32 largest_batch
  7: required list<VersionInfo> versions
  /**
   * What the network takes, in the order in which several arrays are packed to one: [batch, arrays, ...] where
   * all have one shape, else each flattened and one after the other. Absent: float32 of `input_shape`.
   */
  8: optional list<InputArray> inputs
  /** Absent where the model takes no text. */
  9: optional TextInput text
  /** Absent where the model takes no recordings. */
  10: optional SoundInput sound
}

/** Whether the service can answer, which is when it has loaded and warmed up. */
struct Health {
  1: required bool ready
  2: required bool draining
  /** What it is doing, in a word or two. */
  3: required string state
}

/** Counts since the service began, of one version's exits. */
struct ExitStatistics {
  1: required string version
  /** A block, or "base". */
  2: required string exit
  /** Requests that came by, and those that left. */
  3: required i64 queries
  4: required i64 hits
}

/** Counts of values below rising bounds, as Prometheus has them. */
struct Histogram {
  1: required list<double> upper_bounds_s
  2: required list<i64> counts
  3: required double sum_s
}

/** What is remembered of places that requests named, and how far it may answer. */
struct MemoryInfo {
  1: required i32 places
  /** Places that were forgotten for others, since the service began. */
  2: required i64 forgotten
  /** Inputs answered from memory, since the service began. */
  3: required i64 answers
  /** Its settings go from strict to loose: how many there are, and how many of them may answer. */
  4: required i32 settings
  5: required i32 level
  /** The agreement that is promised, or to be proven. */
  6: required double agreement
  7: optional ProofProgress proof
}

/** Counts since the service began. */
struct Statistics {
  1: required i64 inputs
  2: required map<string, i64> refused
  3: required list<ExitStatistics> exits
  4: required Histogram queue_seconds
  5: required Histogram service_seconds
  6: required i32 waiting
  7: required i32 running
  /** Always 0: nothing reads it any more, but older schedulers refuse an answer without it. */
  8: optional double expected_wait_ms
  9: required i64 resident_bytes
  /** Answers given that were compared with the base model's. */
  10: required i64 audits_agreed
  11: required i64 audits_disagreed
  12: required bool stopped
  /** As `describe` tells them. */
  13: optional list<VersionInfo> versions
  /** Lookups of caches that do not answer yet, compared with the base model's answer. */
  14: optional i64 trials_agreed
  15: optional i64 trials_disagreed
  /** Audits, trials and samples that were drawn and not done, for want of time. */
  16: optional i64 left_out
  17: optional MemoryInfo memory
}

/** One model: its engine, and the queue in front of it. */
service Inference {
  InferResponse infer(1: InferRequest request) throws (1: ServiceError error)
  /** Drop a request: what waits is not begun, what runs stops at the next segment. */
  oneway void cancel(1: string request_id)
  /** Load and warm up a version beside those that serve; one of that name is replaced when it is ready. */
  VersionInfo load(1: VersionSource source) throws (1: ServiceError error)
  /**
   * Let a loaded version answer from now on; requests under way are answered by the one they began with. One
   * that is not proven waits: the one that serves goes on, and the new one takes over when it is proven.
   */
  void activate(1: string version) throws (1: ServiceError error)
  /** Forget a version that is not active, once its requests are answered. */
  void unload(1: string version) throws (1: ServiceError error)
  ModelInfo describe() throws (1: ServiceError error)
  Health health()
  Statistics statistics()
}

/** How the caches of one model are kept fitting. */
struct AdaptationStatus {
  1: required string model
  /** Active in the repository; 0 is the composition that the library came with. */
  2: required i32 version
  /** Samples in the window. */
  3: required i64 samples
  4: required bool retraining
  /**
   * What came of the last attempt: activated, reused, kept, skipped or failed; empty before the first. What is
   * activated answers once the inference service has proven it.
   */
  5: required string outcome
  6: required string message
  /** Hit rate of the samples since the version is active, and the one it was measured with. */
  7: required double hit_rate
  8: required double promised_hit_rate
  /** Until it may be time to retrain again, in seconds; absent while a retraining is under way. */
  9: optional double next_s
  /** Seconds of processor time for this model, and the share of it that it is to have when all want some. */
  10: optional double used_s
  11: optional double share
  /** When the last attempt ended, in seconds since 1970. */
  12: optional double changed_s
  /** When the last retraining began, also one that is under way, in seconds since 1970. */
  13: optional double began_s
}

/** Retrains the caches of several models from their record stores, and publishes what is better. */
service Adaptation {
  /** Look for better caches of a model now, whether or not it is time. */
  AdaptationStatus adapt(1: string model) throws (1: ServiceError error)
  list<AdaptationStatus> status()
  Health health()
}
