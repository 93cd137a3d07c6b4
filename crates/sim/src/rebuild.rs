//! Volumes of which both copies of metadata are gone, rebuilt from the nodes that lie there.
//!
//! Method: a [`Victim`] loses pages of its node table and space map, every copy of them; in some
//! rounds all of them, in some another node or both copies of the root as well. Then
//! [`ramet_betree::rebuild`] runs, and the volume is opened. Without another loss it must hold exactly the
//! newest state, and break no invariant. So everything whose nodes lie on the device is back, and
//! nothing that was deleted is. With a lost node each key is as written or answers with an error,
//! the loss is told, and a removal of all keys leaves no violation but nodes that
//! cannot be read. After the loss
//! of the root the volume opens in an older state, or is refused.
//!
//! Some rebuilds are cut at each of their writes. The image opens whole, or is rebuilt again.

use std::sync::Arc;

use ramet_betree::{Batch, Error, Rebuilt, Tree};
use ramet_block::{Budget, Device};

use crate::corrupt::{Structure, Victim, compare_with};
use crate::disk::{Keep, LoggedDevice, PowerCut};
use crate::outcome::{guarded, told};
use crate::{Rng, SparseDevice};

const BLOCK_BYTES: u64 = 4096;
const BUDGET_BYTES: u64 = 64 << 20;

/// Counts of rebuilt volumes.
#[derive(Clone, Copy, Debug, Default)]
pub struct RebuildReport {
    /// Volumes that lost pages only, and are exactly as before.
    pub whole: u64,
    /// Volumes that lost another node too: its keys answer with errors, all others are right.
    pub partial: u64,
    /// Volumes that lost both copies of the root and went back to an older one.
    pub older: u64,
    /// Volumes of which no root was left, and which were refused.
    pub refused: u64,
    /// Images of rebuilds that were cut off, rebuilt again if they were not done.
    pub cuts: u64,
}

impl RebuildReport {
    /// Adds those of another run.
    pub fn add(&mut self, other: &Self) {
        self.whole += other.whole;
        self.partial += other.partial;
        self.older += other.older;
        self.refused += other.refused;
        self.cuts += other.cuts;
    }
}

fn rebuild(image: &Arc<dyn Device>) -> Result<Rebuilt, Error> {
    ramet_betree::rebuild(image, &Budget::of_volumes(BUDGET_BYTES), &mut |_, _| {})
}

impl Victim {
    /// Rebuilds `count` images that have lost metadata.
    ///
    /// # Errors
    /// A wrong byte, a panic, or something that did not come back, with the damage.
    pub fn rebuild(&self, count: u64) -> Result<RebuildReport, String> {
        let mut rng = Rng::new(self.seed ^ 0x5eb1_11d0);
        let mut report = RebuildReport::default();
        for number in 0..count {
            let image = self.image.image();
            let pages = self.lose_pages(&image, &mut rng)?;
            let round = number % 4;
            let done = guarded(|| match round {
                2 => self.lose_node(&image, &mut rng, &mut report),
                3 => self.lose_root(&image, &mut report),
                _ => {
                    if number % 8 == 1 {
                        self.cut(&image, &mut rng, &mut report)?;
                    }
                    let as_device: Arc<dyn Device> = Arc::new(image);
                    let rebuilt = told("rebuild", rebuild(&as_device))?;
                    if !rebuilt.lost.is_empty() {
                        return Err(format!("told as lost: {:?}", rebuilt.lost));
                    }
                    report.whole += 1;
                    self.is_whole(as_device)
                }
            });
            done.map_err(|e| {
                let seed = self.seed;
                format!("seed {seed}, rebuild {number}, pages {pages:?} lost: {e}")
            })?;
        }
        Ok(report)
    }

    /// Loses all copies of one page, of some, or of all.
    fn lose_pages(&self, image: &SparseDevice, rng: &mut Rng) -> Result<Vec<u64>, String> {
        let all = [Structure::NodeTable, Structure::SpaceMap];
        let all = all.iter().filter_map(|kind| self.places.get(kind));
        let pages: Vec<(u64, u64)> = all.flatten().copied().collect();
        let bytes = |place: &(u64, u64)| {
            let mut bytes = vec![0; (place.1 - place.0) as usize];
            told("read", self.image.read_at(place.0, &mut bytes)).map(|()| bytes)
        };
        let contents = pages.iter().map(bytes).collect::<Result<Vec<_>, _>>()?;
        let chance = [1, pages.len(), pages.len() / 3 + 1][rng.below(3)];
        let surely = rng.below(pages.len());
        let mut lost = Vec::new();
        for at in 0..pages.len() {
            if at == surely || rng.one_in(chance) {
                lost.extend((0..pages.len()).filter(|other| contents[*other] == contents[at]));
            }
        }
        lost.sort_unstable();
        lost.dedup();
        let lost: Vec<(u64, u64)> = lost.into_iter().map(|at| pages[at]).collect();
        lost.iter().for_each(|place| zero(image, *place));
        Ok(lost.into_iter().map(|place| place.0).collect())
    }

    fn opened(&self, image: Arc<dyn Device>) -> Result<Tree, String> {
        told("open", Tree::open(image, self.open.clone()))
    }

    /// Checks that the volume is exactly in its newest state, and can be used.
    fn is_whole(&self, image: Arc<dyn Device>) -> Result<(), String> {
        let tree = self.opened(image.clone())?;
        let newest = self.states.last().expect("there is one");
        if compare_with(&tree, newest)? {
            return Err("some keys cannot be read".to_owned());
        }
        none(told("verify", tree.verify(&mut |_| {}))?)?;
        let mut batch = Batch::new();
        batch.put("\0after", "rebuild");
        told("apply", tree.apply(batch))?;
        told("checkpoint", tree.checkpoint())?;
        none(told("verify", tree.verify(&mut |_| {}))?)?;
        told("close", tree.close())?;
        let tree = self.opened(image)?;
        match told("get", tree.get(b"\0after"))? {
            Some(_) => Ok(()),
            None => Err("a change after the rebuild is lost".to_owned()),
        }
    }

    /// Loses another node of one copy, trailer and all.
    fn lose_node(
        &self,
        image: &SparseDevice,
        rng: &mut Rng,
        report: &mut RebuildReport,
    ) -> Result<(), String> {
        let kinds = [Structure::Skeleton, Structure::RunIndex];
        let nodes = kinds.iter().filter_map(|kind| self.places.get(kind));
        let nodes: Vec<(u64, u64)> = nodes.flatten().copied().collect();
        if nodes.is_empty() {
            return Ok(());
        }
        let (start, end) = nodes[rng.below(nodes.len())];
        // A run goes on behind its front part.
        let end = if rng.one_in(2) { end } else { start + 1 };
        zero(image, (start, end));
        let as_device: Arc<dyn Device> = Arc::new(image.image());
        let rebuilt = told("rebuild", rebuild(&as_device))?;
        report.partial += 1;
        let tree = match Tree::open(as_device.clone(), self.open.clone()) {
            Ok(tree) => tree,
            // A replay may need the lost node.
            Err(error) if error.is_of_a_read() => return self.judge_recovery(as_device),
            Err(error) => return Err(format!("open: {error}")),
        };
        let is_missed = compare_with(&tree, self.states.last().expect("there is one"))?;
        if is_missed && rebuilt.lost.is_empty() {
            // The front of a leaf is not read by a rebuild, a check finds it.
            let found = told("verify", tree.verify(&mut |_| {}))?;
            if found.is_empty() {
                return Err("a loss that was not told".to_owned());
            }
        }
        let mut batch = Batch::new();
        batch.delete_range("", None);
        told("apply", tree.apply(batch))?;
        for _ in 0..4 {
            told("checkpoint", tree.checkpoint())?;
        }
        // Messages stay above a segment that is lost.
        let mut left = told("verify", tree.verify(&mut |_| {}))?;
        left.retain(|violation| !violation.starts_with("T9"));
        none(left)?;
        told("close", tree.close())
    }

    fn lose_root(&self, image: &SparseDevice, report: &mut RebuildReport) -> Result<(), String> {
        // Behind a replay the root is new, and nothing reads the copies of the old one.
        let Some(copies) = self.places.get(&Structure::Root) else {
            return Ok(());
        };
        copies.iter().for_each(|place| zero(image, *place));
        let as_device: Arc<dyn Device> = Arc::new(image.image());
        match rebuild(&as_device) {
            Ok(rebuilt) if rebuilt.notes.iter().any(|note| note.contains("went back")) => {}
            Ok(rebuilt) => return Err(format!("the root is back: {rebuilt:?}")),
            Err(Error::Corrupt { .. }) => {
                report.refused += 1;
                return Ok(());
            }
            Err(error) => return Err(format!("rebuild: {error}")),
        }
        report.older += 1;
        let open = ramet_betree::OpenOptions {
            accept_loss: true,
            ..self.open.clone()
        };
        match Tree::open(as_device, open) {
            Ok(tree) => {
                // Nodes whose space was used again are told, and the others are sound.
                told("verify", tree.verify(&mut |_| {}))?;
                match tree.close() {
                    Err(error) if !error.is_of_a_read() => Err(format!("close: {error}")),
                    _ => Ok(()),
                }
            }
            Err(error) if error.is_of_a_read() => Ok(()),
            Err(error) => Err(format!("open: {error}")),
        }
    }

    /// Cuts a rebuild at each of its writes.
    fn cut(
        &self,
        image: &SparseDevice,
        rng: &mut Rng,
        report: &mut RebuildReport,
    ) -> Result<(), String> {
        let logged = Arc::new(LoggedDevice::new(image.image()));
        let as_device: Arc<dyn Device> = logged.clone();
        told("rebuild", rebuild(&as_device))?;
        let mut cut = PowerCut::before(image.image());
        for told_call in logged.log() {
            cut.pass(told_call);
            let keep = [Keep::None, Keep::All, Keep::OnlyLast, Keep::Some][rng.below(4)];
            let left: Arc<dyn Device> = Arc::new(cut.image(keep, rng));
            report.cuts += 1;
            // A rebuild of a volume that is whole changes nothing that shows.
            let rebuilt = told("rebuild after a cut", rebuild(&left))?;
            if !rebuilt.lost.is_empty() {
                return Err(format!("lost by a cut: {:?}", rebuilt.lost));
            }
            self.is_whole(left)?;
        }
        Ok(())
    }
}

fn none(violations: Vec<String>) -> Result<(), String> {
    if violations.is_empty() {
        Ok(())
    } else {
        Err(format!("{violations:?}"))
    }
}

/// Zeros the blocks of a place.
fn zero(image: &SparseDevice, (start, end): (u64, u64)) {
    let first = start - start % BLOCK_BYTES;
    let len = end.next_multiple_of(BLOCK_BYTES) - first;
    let zeros = vec![0; usize::try_from(len).expect("it was read")];
    image.write_at(first, &zeros).expect("inside the device");
}
