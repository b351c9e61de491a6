#include "streams.h"

#include <algorithm>
#include <deque>
#include <exception>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "block.h"
#include "fiber.h"

namespace emulation {
namespace {

struct Held {
  Launch launch;
  std::shared_ptr<const void> owner;
};

int chosen = -1;
std::map<int, std::deque<Held>> streams;

constexpr size_t kFibers = 2;   // the set that streams share; the others are of launches that are not held
constexpr int kSlowness = 100;  // rounds in which a slow stream has one turn

size_t blocks_of(const Launch& launch) {
  return size_t{launch.grid_x} * launch.grid_y;
}

// The launch of a stream that runs.
class Running {
 public:
  Running(Held held, size_t first_fiber) : held_(std::move(held)) {
    release(&state_.start_token);
    for (unsigned i = 0; i < blocks_of(held_.launch); ++i) {
      blocks_.push_back(std::make_unique<Block>(state_, kFibers, first_fiber + i * held_.launch.threads));
      blocks_.back()->start({i % held_.launch.grid_x, i / held_.launch.grid_x, 0});
    }
  }

  // A turn of each block; returns false once all have ended.
  bool step() {
    bool running = false;
    for (const auto& block : blocks_) {
      if (!block->running()) continue;
      if (!block->step()) throw std::runtime_error(std::string(held_.launch.name) + ": " + block->deadlock());
      running = running || block->running();
    }
    return running;
  }

 private:
  const Held held_;
  LaunchState state_{.launch = held_.launch, .previous_ended = true};
  std::vector<std::unique_ptr<Block>> blocks_;
};

void run_streams(int slow) {
  std::map<int, std::unique_ptr<Running>> running;
  std::map<int, size_t> first_fibers;
  size_t fibers = 0;
  for (const auto& [stream, waiting] : streams) {
    size_t most = 0;
    for (const Held& held : waiting) most = std::max(most, blocks_of(held.launch) * held.launch.threads);
    first_fibers[stream] = std::exchange(fibers, fibers + most);
  }
  bool any = true;
  for (int round = 0; any; ++round) {
    any = false;
    for (auto& [stream, waiting] : streams) {
      std::unique_ptr<Running>& current = running[stream];
      if (current == nullptr && waiting.empty()) continue;
      any = true;
      if (stream == slow && round % kSlowness != 0) continue;
      if (current == nullptr) {
        current = std::make_unique<Running>(std::move(waiting.front()), first_fibers[stream]);
        waiting.pop_front();
      }
      if (!current->step()) current.reset();
    }
  }
}

}  // namespace

bool hold(const Launch& launch, const std::shared_ptr<const void>& owner) {
  if (chosen < 0) return false;
  streams[chosen].push_back({launch, owner});
  return true;
}

void emulation_hold(int stream) {
  chosen = stream;
}

void emulation_drop_held() {
  streams.clear();
}

const char* emulation_run_held(int slow) {
  static std::string error;
  error.clear();
  try {
    run_streams(slow);
  } catch (const std::exception& failure) {
    error = failure.what();
  }
  streams.clear();
  return error.empty() ? nullptr : error.c_str();
}

}  // namespace emulation
