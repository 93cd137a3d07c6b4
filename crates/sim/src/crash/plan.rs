//! The plan of a history of power cuts, and the counts of a run.

/// The size of a history, and how thoroughly it is cut.
#[derive(Clone, Debug)]
pub struct CrashPlan {
    /// Seed of history and cuts.
    pub seed: u64,
    /// Batches applied.
    pub batches: usize,
    /// Aimed-at number of keys.
    pub keys_max: usize,
    /// Random images at each position, beside the regular ones.
    pub images: usize,
    /// One in so many recoveries is cut as well.
    pub again_one_in: usize,
    /// One position of the log in so many is cut, and all of recoveries within the history.
    pub cut_one_in: usize,
    /// One image in so many has all its invariants checked; the state is compared always.
    pub verify_one_in: usize,
    /// In histories of batches, the process dies often, and always with a superblock written and
    /// not synced. It finds this superblock when it comes back.
    pub dies_at_superblocks: bool,
}

/// Counts of a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct CrashReport {
    /// Positions of the log.
    pub positions: u64,
    /// Images opened and compared.
    pub images: u64,
    /// Of these, images of a power cut during recovery.
    pub during_recovery: u64,
    /// Of these, with all invariants checked.
    pub verified: u64,
    /// Images that held the newest state, not an older one.
    pub newest: u64,
    /// Deaths of the process within the history.
    pub kills: u64,
    /// Of these, with a power cut.
    pub power_cuts: u64,
    /// Checkpoints in the history.
    pub checkpoints: u64,
    /// Clones in the history.
    pub clones: u64,
    /// Snapshots of the volume in the history.
    pub snapshots: u64,
    /// Rollbacks of the open volume in the history.
    pub rollbacks: u64,
    /// Ingests in the history.
    pub ingests: u64,
    /// Batches applied while a sync was under way.
    pub interruptions: u64,
    /// Times that the journal went round.
    pub laps: u64,
    /// Calls that were refused because the volume was full.
    pub refused: u64,
}

impl CrashReport {
    /// Adds the counts of another run.
    pub fn add(&mut self, other: &Self) {
        self.positions += other.positions;
        self.images += other.images;
        self.during_recovery += other.during_recovery;
        self.verified += other.verified;
        self.newest += other.newest;
        self.kills += other.kills;
        self.power_cuts += other.power_cuts;
        self.checkpoints += other.checkpoints;
        self.clones += other.clones;
        self.snapshots += other.snapshots;
        self.rollbacks += other.rollbacks;
        self.ingests += other.ingests;
        self.interruptions += other.interruptions;
        self.laps += other.laps;
        self.refused += other.refused;
    }
}
