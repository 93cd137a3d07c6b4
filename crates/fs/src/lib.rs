//! The file system of a Ramet volume: paths, inodes, data and clones on the tree.
//!
//! A [`Volume`] hands out the components that do the work: [`Names`], [`Directories`], [`Files`],
//! [`Attributes`], [`Trees`], [`Snapshots`] and [`Controls`]. They offer the operations of FUSE, by inode number,
//! and clones. All keys are in one key space (`format/keys.rs`, `format/record.rs`), and every
//! operation is one batch of the tree. `docs/fs.md` has the semantics.
//!
//! # Locks
//!
//! Locks are taken in this order, each kind in the order of inode numbers. No lock is taken before
//! one that is already held:
//!
//! 0. the control calls with several answers that are under way ([`ControlState`]), the measure of
//!    a fork, the place of the collection of forks, the state of an import, the pass that counts
//!    links: each held over whole operations, which wait for room and the device, and take locks
//!    of the other kinds. No thread holds two of them;
//! 1. the registry of snapshots, then the views of them: held over batches, may wait for room and
//!    the device;
//! 2. `Inode::names` of directories: their entries. Held over the check whether a name exists and
//!    the change that follows; may wait for the device;
//! 3. `Namespace::links`: the names of hard links; may wait for the device;
//! 4. `Inode::state`: the record and the contents; may wait for the device;
//! 5. `Inode::has_links`: whether a clone root has hard links; may wait for the device. A new hard
//!    link sets it with the topology held: `links` keeps it apart from the lookup that waits for
//!    the topology;
//! 6. the tables of inode numbers (`Numbers::given`): held over a batch of its own, which gives a block
//!    of numbers, reserves generations, changes marks, or gives blocks back; may wait for room and the
//!    device. A look at a run tries for the state of its directory meanwhile, and waits for none;
//! 7. `Namespace::topology`: the locations of inodes. Held for reading while keys are made and the
//!    batch is applied or a snapshot is taken, for writing while directories move. The work under
//!    it is in memory, as a rule. A batch of a holder for reading waits for checkpoints and the
//!    device in two cases: volume or journal filled up after `Tree::admit`, and the option `sync`.
//!    Clones, renames and removals of trees hold it, or 3, for writing. Their batches may need nodes
//!    or room first. The operation then lets all its locks go, has the work done, begins anew; a
//!    late round waits under its locks
//!    ([`Namespace::until_applied`](namespace::resolve::Namespace::until_applied));
//! 8. the counts of protected inodes: held over a batch, with the topology held for reading;
//! 9. `Inode::location`, `Inode::cached_path`, `Inode::count`, the shards and hints of the table,
//!    the deferred deletes, the known blocks of a directory, the notes of a clone root, the entries
//!    that readers are about to ask for, the imports by their streams, the deletes and passes that
//!    failed: for a moment, one at a time. The inodes that the kernel is to be told of are held
//!    over the shards of the table. A directory leaves the marks of its blocks with its shard, its
//!    known blocks and the notes about blocks (`namespace/block_notes.rs`) locked, in this order.
//!
//! [`ramet_betree::Tree::admit`], which waits for room, comes before 1 to 9, and behind 0. Four
//! operations are exceptions. A join of some 1,000 names and more waits for room between its parts
//! with a lock of the kind 3 (`ops/join.rs`). A slot index of many bytes is made with locks of the
//! kinds 1 and 2 (`namespace/slot_index.rs`). A clone or removal of a directory with many hard
//! links below gets a generation with locks of the kinds 2 and 3 (`ops/hard_links.rs`). A name
//! whose number was never shown gets a block of numbers with the locks of the lookup held, of the
//! kinds 1 to 4.
#![forbid(unsafe_code)]

mod clock;
mod error;
mod examine;
mod format;
mod namespace;
mod ops;
mod options;
mod receive;
mod rollback;
mod tools;
mod volume;

pub use ramet_betree::{Logical, SHUT_DOWN, TreeShape, Usage};

pub use tools::{control, fence};

pub use clock::{Clock, SystemClock};
pub use error::{Error, Result};
pub use examine::{Examination, ExaminationStep, ExamineError, Examined, examine};
pub use format::blocks::{BLOCK_BYTES, FILE_BYTES_MAX};
pub use format::fork::check_note;
pub use format::import::{
    FRAME_BYTES_MAX, FRAME_HEAD_BYTES, FrameWriter, IMPORT_PATH_BYTES_MAX, ITEM_BYTES_MAX,
    ImportAttr, ImportBody, ImportItem, Items, frame_bytes,
};
pub use format::ino::{Ino, ROOT_INO};
pub use format::name::{NAME_BYTES_MAX, RESERVED_NAME, check_name, split_path};
pub use format::record::{Kind, TARGET_BYTES_MAX, Time};
pub use format::snapshot::{MadeBy, Period, Policy, PolicyError, check_snapshot_name};
pub use format::stream::{
    CopyFrom, NewObject, SECTION_BYTES_MAX, SECTION_HEAD_BYTES, STREAM_HEAD_BYTES, SectionHead,
    Sections, SentAttributes, SentFlags, StreamId, StreamItem, StreamItems, decode_stream_head,
    encode_stream_head,
};
pub use namespace::attr::Attr;
pub use namespace::invalidation::Invalidation;
pub use namespace::known_below::{KnownBelow, KnownName};
pub use ops::access::{Caller, Capabilities, Credentials, NOBODY, Writer};
pub use ops::attr::{Attributes, SetAttr, SetTime};
pub use ops::clone::CloneMode;
pub use ops::copy_range::Copied;
pub use ops::create::NewInode;
pub use ops::data::{Files, Written};
pub use ops::file_flags::FileFlags;
pub use ops::fork::was_dropped;
pub use ops::fork_record::NewFork;
pub use ops::forks::{ForkBytes, ForkEntry, ForkOrigin, Forks, SomeForks};
pub use ops::import::{Import, Imports};
pub use ops::import_stage::ImportCounts;
pub use ops::live_rollback::{FormerRoot, RolledBack};
pub use ops::merge_steps::MergeParts;
pub use ops::names::Names;
pub use ops::readdir::{DirEntry, Directories};
pub use ops::rename::RenameMode;
pub use ops::snapshot_records::{DamagedSnapshot, SnapshotEntry};
pub use ops::snapshots::Snapshots;
pub use ops::staged::StagedObject;
pub use ops::trees::Trees;
pub use ops::xattr::{SetXattr, XATTR_BYTES_MAX};
pub use options::{
    AccessTime, FormatOptions, LinkStats, LockStats, MemoryStats, OpenOptions, VolumeStats,
};
pub use receive::{
    Destination, Found, InVolume, ReceiveCounts, ReceiveError, ReceivedTree, Receiver, Replace,
    Unfinished, discard, unfinished,
};
pub use rollback::{roll_back, roll_back_open};
pub use tools::check::Finding;
pub use tools::controls::{ControlState, Controls};
pub use tools::diff::{Change, Difference};
pub use tools::fork_calls::{
    ForkReply, ForkRequest, OldNumbers, ToldFork, ToldForkChange, ToldForkChanges, ToldMeasure,
    answer_forks, copy_base,
};
pub use tools::merge::{MergeOptions, Merged, MergedName, merge_fork};
pub use tools::merge_calls::{MergeRequest, ToldMerge, ToldMergedName, path_of_text, text_of_path};
pub use tools::merge_plan::{Clash, Conflict, Favor, LeftOut};
pub use tools::mkfs::UnfinishedVolume;
pub use tools::scrub::{Damaged, ScrubPage};
pub use tools::send_calls::{SendPage, SendRequest};
pub use tools::snapshot_calls::{
    MountToServe, SnapshotReply, SnapshotRequest, ToldChange, ToldDamage, ToldSnapshot,
    answer_snapshots,
};
pub use tools::stage_calls::{Replaced, STAGED_NAME, StageReply, StageRequest};
pub use volume::{
    Volume, compact_view, has_lost_its_snapshot, inodes_bytes, is_view, passing_view, view,
};
