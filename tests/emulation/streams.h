// Launches on several GPUs at a time, for kernels that wait for each other's.
//
// While launches are held, a call of an operator only notes its kernels, in the stream that was chosen last. Then all
// streams run together: the launches of one after the other, those of different streams at the same time, block by
// block in turns, and all blocks of a launch at once.
#pragma once

#include <memory>

#include "emulator.h"

namespace emulation {

// Notes the launch if launches are held, and returns whether they are.
bool hold(const Launch& launch, const std::shared_ptr<const void>& owner);

// Holds launches in this stream; a negative number holds no more.
extern "C" __attribute__((visibility("default"))) void emulation_hold(int stream);

// Forgets what is held.
extern "C" __attribute__((visibility("default"))) void emulation_drop_held();

// Runs what is held. Returns null, or the error that ended it. The stream `slow` gets one turn in the time of many, so
// that the others are as far ahead as their kernels allow; with a negative number none is slow.
extern "C" __attribute__((visibility("default"))) const char* emulation_run_held(int slow);

}  // namespace emulation
