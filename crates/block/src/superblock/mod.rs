//! The superblock: where everything begins, and which checkpoint is the newest.
//!
//! Two slots hold one 4096-byte block each, in two copies. Generation g is written to slot g mod 2:
//! the first copy, a sync, then the second. So a power cut tears one copy of the older slot at
//! most, and a rotten block costs nothing: the other copy is as good. The copies of the slots lie
//! crosswise, so that damage to either half of the area leaves a copy of both.
//!
//! ```text
//!  0: slot 0    32768: slot 1, second    65536: slot 1    98304: slot 0, second
//! ```
//!
//! `format.rs` encodes one copy, `choose.rs` decides which superblock counts, as a pure function of
//! the copies, and `copies.rs` reads, writes and repairs the copies of a device. Magic, version and
//! checksum stay at their places in every future version, so that an old build can tell "newer"
//! from "broken".

mod choose;
mod copies;
mod format;

pub use choose::{Copy, choose};
pub(crate) use copies::are_copies_outdated;
pub use copies::{
    BadCopy, bad_copies, go_back, read_copies, read_superblock, scrub_copies, write_superblock,
};
pub use format::{
    AREA_END, FORMAT_VERSION, JournalPos, MetadataCopies, SLOTS, Superblock, SuperblockError,
};
