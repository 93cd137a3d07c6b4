//! Pages that commits freed while a checkpoint was pinned, and that are kept from use
//! ([`crate::TablePin`]).

use parking_lot::Mutex;
use ramet_block::Extent;

/// Part of the volume that pins keep from use at most.
pub(crate) const HELD_PART: u64 = 16;

/// The pins of a table. The lock is held for memory operations only.
#[derive(Default)]
pub(crate) struct Pins(Mutex<Held>);

#[derive(Default)]
struct Held {
    pins: u64,
    /// Pages that commits freed since the oldest pin was made.
    pages: Vec<Extent>,
    bytes: u64,
    /// How often pins broke.
    breaks: u64,
}

impl Pins {
    /// Keeps those of the `pages` that pins may need, and returns the extents that are to be given
    /// back.
    pub(crate) fn keep(&self, pages: Vec<Extent>, volume_bytes: u64) -> Vec<Extent> {
        let mut held = self.0.lock();
        if held.pins == 0 {
            return pages;
        }
        held.bytes += pages.iter().map(|page| page.len).sum::<u64>();
        held.pages.extend(pages);
        if held.bytes <= volume_bytes / HELD_PART {
            return Vec::new();
        }
        held.breaks += 1;
        held.bytes = 0;
        std::mem::take(&mut held.pages)
    }

    /// A pin is made. Returns how often pins broke before.
    pub(crate) fn begin(&self) -> u64 {
        let mut held = self.0.lock();
        held.pins += 1;
        held.breaks
    }

    /// A pin ends. Returns the pages that are to be given back.
    pub(crate) fn end(&self) -> Vec<Extent> {
        let mut held = self.0.lock();
        held.pins -= 1;
        if held.pins > 0 {
            return Vec::new();
        }
        held.bytes = 0;
        std::mem::take(&mut held.pages)
    }

    /// How often pins broke.
    pub(crate) fn breaks(&self) -> u64 {
        self.0.lock().breaks
    }
}
