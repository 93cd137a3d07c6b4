//! Faults on purpose: one-line mistakes that somebody could make, for tests of the simulator.
//!
//! Each stands in the code where it would be made, as `if failpoints::is_on(Fault::..)`. Without
//! `--cfg failpoints` that is a constant `false`, so nothing of it is compiled in. With it, `set`
//! chooses the fault for the thread that calls it: a simulation runs on one thread, so several
//! simulations can be under way. The switch is no feature of cargo, since `--all-features` would
//! put it into a release.

/// A mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// The superblock is written without a sync of the nodes that it names.
    NodesUnsynced,
    /// Freed space is used again before the superblock is durable.
    SuperblockUnsynced,
    /// A commit does not sync the journal.
    JournalUnsynced,
    /// Extents that a record names are not synced before the record.
    ExtentsUnsynced,
    /// Recovery builds upon bytes that an earlier process wrote and did not sync.
    OpenWithoutSync,
    /// Space is allocatable as soon as a commit frees it.
    FreedSpaceReusedEarly,
    /// Freed space is discarded before the superblock is durable.
    DiscardedEarly,
    /// A new volume is made while the superblocks of an older one stand.
    OldVolumeStands,
    /// A superblock names the new size before the device has it.
    SizeToldEarly,
    /// The journal behind a loss is cleared before the state before the loss is durable.
    JournalClearedEarly,
    /// Space of a node that is gone stays taken.
    SpaceLeaked,
    /// The last child of a new node is not counted.
    CountLost,
    /// Nodes go although readers hold them.
    ZombieReclaimedEarly,
    /// Recovery leaves extents that records name in the free space.
    NamedExtentNotPinned,
    /// A leaf that a record names is free as soon as nothing refers to it.
    PinnedLeafFreedAtOnce,
    /// A checkpoint frees leaves that records behind its cut name.
    PinnedLeafFreedAtEnd,
    /// Journal frames are written over before the checkpoint that makes them needless is durable.
    JournalReleasedEarly,
    /// Journal frames are written over that are needed.
    JournalOverrun,
    /// A checkpoint names the journal position of the one before.
    JournalStartStale,
    /// One record in eight is not replayed.
    RecordNotReplayed,
    /// A mount takes the epoch of the one before.
    EpochNotRaised,
    /// Frames are written under an epoch that no durable superblock has.
    EpochNotDurable,
    /// Frames of older epochs are replayed.
    OlderEpochAccepted,
    /// Checksums of frames are not looked at.
    FrameChecksumSkipped,
    /// A frame that was durable and is missing ends the journal.
    LostFrameIgnored,
    /// Checksums of skeletons and of fronts of runs are not looked at.
    NodeChecksumSkipped,
    /// Checksums of blocks of runs are not looked at.
    BlockChecksumSkipped,
    /// A checkpoint names the node numbers of the one before as never used.
    NodeNumbersStale,
    /// A filter denies one in eight of the keys that are there.
    FilterLies,
    /// A segment that is clipped with its node loses the part of the last edge.
    ClipTooShort,
    /// A node that is lifted keeps the old translations of its segments.
    TranslationStale,
    /// A node that is shown at another distance leaves its children at the old one.
    DistanceStale,
    /// An edge that a GOTO became hides newer segments too.
    WatermarkTooHigh,
    /// Range deletions are lost on their way down.
    NullLost,
    /// After a failed write or sync the next one may succeed.
    FailureForgotten,
    /// A new name of a file is not counted.
    LinkCountLost,
    /// A clone with many hard links does not note that they are not counted.
    UncountedNoteLost,
    /// A removal of a tree with many hard links does not note them.
    RemovedLinksForgotten,
    /// Links that were counted before are counted once more by the background.
    LinksSettledTwice,
    /// The background erases a shared inode that names lead to.
    LinkedFileErasedEarly,
    /// A name of a file is left behind when its clone root is joined to another one.
    JoinedNameLost,
    /// Notes of links go before all links are counted.
    NotesDroppedEarly,
    /// Files that were unlinked while open stay after a crash.
    OrphanKept,
    /// A new name takes over the keys that a deleted entry left there.
    DeletedNameNotFreed,
    /// Generations of inode numbers are given out before they are reserved.
    NumbersNotReserved,
    /// A block of inode numbers is shown and not stored.
    NumberBlockLost,
    /// A pinned number counts in every directory, also in copies.
    PinCountsAnywhere,
    /// A block of inode numbers is free although inodes that were moved away have some of them.
    HeldBlockFreed,
    /// A number is shown without its mark, which holds the block of the number.
    NumberMarkLost,
    /// The counter of inode numbers is not stored with a new block, which is given again later.
    NumberGivenTwice,
    /// An object that waits for its name has another one meanwhile, and keeps it.
    StagedNameKept,
    /// Names and records of one change are two batches.
    ChangeTorn,
    /// A snapshot gets the contents of files by a batch of its own.
    SnapshotTorn,
    /// A rollback of an open volume puts the files of before away by a batch of its own.
    RollbackTorn,
    /// The next snapshot gets the id of the last one.
    SnapshotIdGivenAgain,
    /// A snapshot that is removed leaves its contents of files behind.
    SnapshotContentsKept,
}

/// Kills this process as `kill -9` does, if the variable `RAMET_DIES_AT` of its environment names
/// this step.
#[cfg(failpoints)]
pub fn die_at(step: &str) {
    if std::env::var("RAMET_DIES_AT").is_ok_and(|named| named == step) {
        let killed =
            rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
        killed.expect("a process may kill itself");
        loop {
            std::thread::park();
        }
    }
}

/// Without `--cfg failpoints`, nothing.
#[cfg(not(failpoints))]
#[inline(always)]
pub const fn die_at(_: &str) {}

#[cfg(failpoints)]
thread_local! {
    static ACTIVE: std::cell::Cell<Option<Fault>> = const { std::cell::Cell::new(None) };
}

/// Makes this thread make a mistake, or no more.
#[cfg(failpoints)]
pub fn set(fault: Option<Fault>) {
    ACTIVE.set(fault);
}

/// Whether this thread is to make it.
#[cfg(failpoints)]
#[must_use]
pub fn is_on(fault: Fault) -> bool {
    ACTIVE.get() == Some(fault)
}

/// Whether this thread is to make it: never, without `--cfg failpoints`.
#[cfg(not(failpoints))]
#[inline(always)]
#[must_use]
pub const fn is_on(_: Fault) -> bool {
    false
}
