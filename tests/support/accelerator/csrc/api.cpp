// The C ABI that __init__.py calls by ctypes, and the report of a host access to device memory.
#include <signal.h>
#include <unistd.h>

#include <ATen/Parallel.h>

#include <cstring>
#include <sstream>
#include <string>

#include "device.h"
#include "runtime.h"

using namespace simulated;

namespace {

thread_local std::string reply;
struct sigaction previous_action;

const char* const kKinds[] = {"operator", "copy up", "copy down", "copy across", "copy",
                              "record",   "wait",    "free",      "host wait",   "host access"};

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (char each : text) {
    if (each == '"' || each == '\\') out += '\\';
    out += static_cast<unsigned char>(each) < 0x20 ? ' ' : each;
  }
  return out + "\"";
}

void write_record(std::ostringstream& out, const Record& record) {
  out << "{\"id\":" << record.id << ",\"kind\":\"" << kKinds[static_cast<int>(record.kind)]
      << "\",\"device\":" << record.device << ",\"stream\":" << record.stream << ",\"name\":" << quoted(record.name)
      << ",\"nbytes\":" << record.nbytes << ",\"line\":" << quoted(record.line) << ",\"waits\":[";
  for (size_t each = 0; each < record.waits.size(); ++each) out << (each ? "," : "") << record.waits[each];
  out << "]}";
}

const char* answer(std::string text) {
  reply = std::move(text);
  return reply.c_str();
}

// The items of a report as one JSON list.
template <typename Items, typename Write>
const char* answer_list(const Items& items, Write write) {
  std::ostringstream out;
  const char* before = "[";
  for (const auto& item : items) {
    out << before;
    write(out, item);
    before = ",";
  }
  if (items.empty()) out << before;
  out << "]";
  return answer(out.str());
}

// Say what the program touched, then let the handler of before (faulthandler's) print the traceback and end it.
void on_fault(int signal, siginfo_t* info, void*) {
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  if (Runtime::get().owns(address, nullptr)) {
    const std::string text =
        "\nThe host touched device memory: " + Runtime::get().describe(address, true) + "\n";
    ssize_t written = write(STDERR_FILENO, text.data(), text.size());
    (void)written;
  }
  sigaction(signal, &previous_action, nullptr);
}

}  // namespace

extern "C" {

void simulated_configure(uint64_t seed, uint64_t copy_us, uint64_t event_us, uint64_t operator_us, int poison,
                         int lines, int devices, int64_t limit) {
  Runtime::get().configure({seed, copy_us, event_us, operator_us, poison != 0, lines != 0, at::get_num_threads()}, devices, limit);
}

void simulated_reset() { Runtime::get().reset(); }
void simulated_close() { Runtime::get().close(); }
int simulated_forked() { return Runtime::get().usable() ? 0 : 1; }
int simulated_devices_max() { return kDevicesMax; }
void simulated_fail_at(int64_t nth) { Runtime::get().fail_at(nth); }

void simulated_catch_faults() {
  struct sigaction action;
  std::memset(&action, 0, sizeof action);
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &previous_action);
}

// Null when it worked, else the reason.
const char* simulated_register(uintptr_t pointer, uint64_t nbytes) {
  std::string reason = Runtime::get().pin(pointer, nbytes, nullptr);
  return reason.empty() ? nullptr : answer(reason);
}

const char* simulated_unregister(uintptr_t pointer) {
  try {
    Runtime::get().unpin(pointer);
    return nullptr;
  } catch (const std::exception& error) {
    return answer(error.what());
  }
}

void simulated_host_access(uintptr_t pointer, uint64_t nbytes, int write, const char* name) {
  Runtime::get().host_access(pointer, nbytes, write != 0, name);
}

// Queue a function of the host, as cudaLaunchHostFunc does. ranges: begin, end and whether it is written, of each.
void simulated_call(int device, int64_t stream, const char* name, const uint64_t* ranges, int count, void (*run)()) {
  std::vector<Access> accesses;
  uint64_t nbytes = 0;
  for (int each = 0; each < count; ++each) {
    accesses.push_back({ranges[3 * each], ranges[3 * each + 1], ranges[3 * each + 2] != 0});
    nbytes += ranges[3 * each + 1] - ranges[3 * each];
  }
  Runtime& runtime = Runtime::get();
  runtime.submit(runtime.stream(device, stream), Kind::Operator, name, nbytes, accesses, run);
}

// Where a device's thread finds what the program has at `address`.
uintptr_t simulated_host_view(uintptr_t address) {
  return reinterpret_cast<uintptr_t>(Runtime::host_view(address));
}

void simulated_seed(int device, uint64_t seed) {
  at::Generator generator = default_generator(device);
  std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_current_seed(seed);
}

// The state of a device's default generator: two words, read or written.
void simulated_random_state(int device, uint64_t* words, int write) {
  at::Generator generator = default_generator(device);
  std::lock_guard<std::mutex> lock(generator.mutex());
  if (write) {
    generator.set_current_seed(words[0]);
    generator.set_offset(words[1]);
  } else {
    words[0] = generator.current_seed();
    words[1] = generator.get_offset();
  }
}

const char* simulated_log() { return answer_list(Runtime::get().log(), write_record); }

const char* simulated_races() {
  return answer_list(Runtime::get().races(), [](std::ostringstream& out, const Race& race) {
    out << "{\"first\":";
    write_record(out, race.first);
    out << ",\"second\":";
    write_record(out, race.second);
    out << ",\"first_writes\":" << (race.first_writes ? "true" : "false")
        << ",\"second_writes\":" << (race.second_writes ? "true" : "false") << ",\"begin\":" << race.begin
        << ",\"end\":" << race.end << ",\"where\":" << quoted(race.where) << "}";
  });
}

const char* simulated_stats(int device) {
  const Stats stats = Runtime::get().stats(device);
  std::ostringstream out;
  out << "{\"allocated\":" << stats.allocated.now << ",\"allocated_peak\":" << stats.allocated.peak
      << ",\"reserved\":" << stats.reserved.now << ",\"reserved_peak\":" << stats.reserved.peak
      << ",\"blocks\":" << stats.blocks.now << ",\"allocations\":" << stats.blocks.total
      << ",\"segments\":" << stats.segments.now << ",\"failures\":" << stats.failures
      << ",\"limit\":" << stats.limit << "}";
  return answer(out.str());
}

}  // extern "C"
