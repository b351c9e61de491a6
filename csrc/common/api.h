// FASTINFER_API marks the declarations that libfastinfer.so exports: launchers, and what they share. All else is
// compiled with hidden visibility.
#pragma once

#define FASTINFER_API __attribute__((visibility("default")))
