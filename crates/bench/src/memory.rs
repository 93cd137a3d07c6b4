//! Memory of a virtual machine that its host takes back.
//!
//! A guest may tell its host which pages are free (free page reporting), and the host takes them.
//! The next thread that touches a page of these waits until the host has given one back, some 7 us
//! each where this was found. Dropping caches frees nearly all memory at once, so a phase that
//! begins cold would pay for the pages that were taken until then: a cold grep of 100,000 files
//! takes 1.1 s or 2.6, and 0.7 of that are the host's. Therefore nothing is given back while
//! measuring, and all free memory is touched once before.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{At, Error, Result};

/// The power of two of pages that blocks have at least to be reported.
const ORDER: &str = "/sys/module/page_reporting/parameters/page_reporting_order";
/// Above all blocks that there are; else the largest.
const ORDERS_MAX: [&str; 2] = ["11", "10"];
/// Bytes that are left free for other programs.
const LEFT_BYTES: u64 = 2 << 30;
const PIECE_BYTES: usize = 64 << 20;

/// Nothing is given back to the host until this is dropped.
pub(crate) struct Kept {
    order: String,
}

impl Kept {
    /// `None` where the kernel gives nothing back by itself, or does not let it be stopped.
    pub(crate) fn new() -> Option<Kept> {
        let order = std::fs::read_to_string(ORDER).ok()?;
        let [above, largest] = ORDERS_MAX;
        let set = std::fs::write(ORDER, above).or_else(|_| std::fs::write(ORDER, largest));
        if let Err(error) = set {
            eprintln!(
                "ramet-bench: free memory goes back to the host meanwhile, and seconds wander: {ORDER}: {error}"
            );
            return None;
        }
        Some(Kept { order })
    }

    /// Touches the free memory, and frees it again.
    pub(crate) fn touch(&self, interrupted: &AtomicBool) -> Result<()> {
        drop_caches()?;
        let bytes = available_bytes()?.saturating_sub(LEFT_BYTES);
        let mut pieces = Vec::new();
        while (pieces.len() as u64) < bytes / PIECE_BYTES as u64 {
            if interrupted.load(Ordering::Relaxed) {
                return Err(Error::Interrupted);
            }
            let mut piece = Vec::new();
            if piece.try_reserve_exact(PIECE_BYTES).is_err() {
                break;
            }
            // Zeros would be promised only.
            piece.resize(PIECE_BYTES, 1_u8);
            pieces.push(std::hint::black_box(piece));
        }
        Ok(())
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        if let Err(error) = std::fs::write(ORDER, self.order.trim()) {
            eprintln!("ramet-bench: {ORDER}: {error}");
        }
    }
}

/// Has the kernel forget clean pages, names and inodes, which it can read again.
pub(crate) fn drop_caches() -> Result<()> {
    let path = "/proc/sys/vm/drop_caches";
    std::fs::write(path, "3").at(path)
}

fn available_bytes() -> Result<u64> {
    let path = "/proc/meminfo";
    let told = std::fs::read_to_string(path).at(path)?;
    let line = told
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.map(|kib| kib << 10)
        .ok_or_else(|| Error::Missing(format!("{path} does not tell what memory is available")))
}
