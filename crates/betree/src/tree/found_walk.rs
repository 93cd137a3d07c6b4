//! The nodes below a root, out of those that were found on the device.
//!
//! [`Survey::of`] walks first and says which nodes lie there, which cannot be read and which are
//! lost. The space of all others is free then, and a new table is written to it. So the second
//! walk, [`Survey::fill`], must find the same: a node that cannot be read any more ends it.
//!
//! A node that cannot be read does not say which nodes it names. Its record in the old table does,
//! if it is left. The nodes of the record stay, and are there when the bytes of the node come back.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Weak};

use ramet_block::{Call, Device, checksum};
use ramet_nodetable::{NodeId, OldTable};

use crate::error::{Error, Result, io_error_at};
use crate::key::range::KeyRange;
use crate::key::translation::Translation;
use crate::node::handle::{Handle, Kind, Owner, Place, Stage};
use crate::node::message::RangeMsg;
use crate::node::run_index::{RunIndex, index_len};
use crate::node::skeleton::Skeleton;
use crate::node::trailer::Trailer;
use crate::node::wire::MALFORMED;
use crate::store::handles::Handles;
use crate::tree::found_nodes::{FoundNodes, read_node};
use crate::tree::scrub::{Damage, Way, damage};

/// A node as the node above names it.
struct Named {
    id: NodeId,
    kind: Kind,
    height: u32,
    way: Way,
}

/// A node that cannot be read, or that is lost.
struct Gone {
    kind: Kind,
    height: u32,
    /// Position of a node that lies there.
    at: Option<usize>,
    /// The nodes that it names as far as a record tells, one entry for each time.
    children: Vec<NodeId>,
}

/// A node below the root, with the nodes that it names, one entry for each time.
pub(crate) enum Item<'a> {
    Found(&'a Trailer, Vec<NodeId>),
    /// It lies there, and cannot be read.
    Unreadable(&'a Trailer, Vec<NodeId>),
    Lost(NodeId, Kind, u32, Vec<NodeId>),
}

/// The outcome of the first walk.
pub(crate) struct Survey {
    /// Nodes that are named and were not found or cannot be read, with their keys.
    pub(crate) lost: Vec<Damage>,
    /// For each position of the nodes found, whether the node lives.
    is_live: Vec<bool>,
    gone: HashMap<NodeId, Gone>,
}

/// The first walk.
struct FirstWalk<'a> {
    dev: &'a dyn Device,
    found: &'a FoundNodes,
    old: &'a [OldTable],
    survey: Survey,
    todo: Vec<Named>,
    /// Nodes that records alone name, which tell no keys: the other ways come first.
    later: Vec<Named>,
}

enum Step {
    Enter(NodeId),
    /// With the nodes that it names.
    Leave(NodeId, Vec<NodeId>),
}

/// Stands for a node in contents that are decoded to see which nodes they name.
pub(crate) fn named_handle(id: NodeId, kind: Kind, height: u32) -> Arc<Handle> {
    let owner: Weak<Handles> = Weak::new();
    let owner: Weak<dyn Owner> = owner;
    Handle::new((id, kind, height), Stage::Recorded, None, owner)
}

fn child_of(id: u64, height: u32) -> Option<Arc<Handle>> {
    let kind = match height {
        0 => Kind::Leaf,
        _ => Kind::Skeleton,
    };
    Some(named_handle(NodeId(id), kind, height))
}

fn corrupt(place: &Place, detail: impl ToString) -> Error {
    Error::Corrupt {
        what: "node",
        addr: place.addr(),
        detail: detail.to_string(),
    }
}

fn verify(bytes: &[u8], place: &Place) -> Result<()> {
    if checksum(bytes) == place.checksum {
        return Ok(());
    }
    Err(corrupt(place, "it has another checksum"))
}

/// The interior node at `place`.
pub(crate) fn skeleton_at(dev: &dyn Device, place: &Place) -> Result<Skeleton> {
    let bytes = read_node(dev, place)?;
    verify(&bytes, place)?;
    let mut segment = |id| Some(named_handle(NodeId(id), Kind::Segment, 0));
    let node = Skeleton::decode(&bytes, &mut child_of, &mut segment);
    node.map_err(|error| corrupt(place, error))
}

fn segment_at(dev: &dyn Device, place: &Place) -> Result<RunIndex> {
    let bytes = read_node(dev, place)?;
    let len = index_len(&bytes, place.used_bytes).ok_or_else(|| corrupt(place, MALFORMED))?;
    let front = &bytes[..len];
    verify(front, place)?;
    let index = RunIndex::decode(front, Kind::Segment, place.used_bytes, &mut child_of);
    index.map_err(|error| corrupt(place, error))
}

/// Hands over the nodes that `node` names, with the keys that lead there.
fn names_of(
    dev: &dyn Device,
    node: &Trailer,
    push: &mut dyn FnMut(&KeyRange, &Translation, &Handle),
) -> Result<()> {
    match node.kind {
        Kind::Leaf => {}
        Kind::Segment => {
            for (range, msg) in &segment_at(dev, &node.place)?.ranges {
                if let RangeMsg::Goto(target) = msg {
                    push(range, &target.translation, &target.node);
                }
            }
        }
        Kind::Skeleton => {
            let node = skeleton_at(dev, &node.place)?;
            for (at, edge) in node.edges.iter().enumerate() {
                if let Some(child) = &edge.child {
                    push(&node.edge_range(at), &child.translation, &child.node);
                }
            }
            for segment in &node.segs {
                push(&segment.clip, &segment.translation, &segment.run);
            }
        }
    }
    Ok(())
}

/// The kind and height of a node that a record of a node of that height names: a guess, for a node
/// without a trailer and a record.
fn guess_below(height: u32) -> (Kind, u32) {
    match height {
        0 | 1 => (Kind::Leaf, 0),
        _ => (Kind::Skeleton, height - 1),
    }
}

impl FirstWalk<'_> {
    fn run(&mut self) {
        while let Some(named) = self.todo.pop().or_else(|| self.later.pop()) {
            let at = self.found.position(named.id);
            if self.survey.gone.contains_key(&named.id)
                || at.is_some_and(|at| self.survey.is_live[at])
            {
                continue;
            }
            let is_right = |at: &usize| {
                let node = self.found.node(*at);
                (node.kind, node.height) == (named.kind, named.height)
            };
            let Some(at) = at.filter(is_right) else {
                let error = self.not_found(&named);
                self.give_up(&named, None, error);
                continue;
            };
            self.survey.is_live[at] = true;
            let mut below = Vec::new();
            let read = names_of(self.dev, self.found.node(at), &mut |range, keys, child| {
                below.push(Named {
                    id: child.id(),
                    kind: child.kind(),
                    height: child.height(),
                    way: named.way.below(range, keys),
                });
            });
            match read {
                Ok(()) => self.todo.extend(below.into_iter().rev()),
                Err(error) => self.give_up(&named, Some(at), error),
            }
        }
    }

    fn not_found(&self, named: &Named) -> Error {
        let fault = if self.found.is_displaced(named.id) {
            "was found in the place of another one"
        } else {
            "is not on the device"
        };
        Error::Corrupt {
            what: "node",
            addr: 0,
            detail: format!(
                "node {} ({:?} of height {}) {fault}",
                named.id.0, named.kind, named.height
            ),
        }
    }

    /// Tells the loss of a node, and goes on with the nodes of its record.
    fn give_up(&mut self, named: &Named, at: Option<usize>, error: Error) {
        self.survey.lost.push(damage(error, named.way.range()));
        let mut children = self.old.iter().filter_map(|old| old.children(named.id));
        let children = children.next().unwrap_or_else(Vec::new);
        for id in &children {
            let child = self.found.position(*id).map(|at| self.found.node(at));
            let known = child.map(|child| (child.kind, child.height));
            let (kind, height) = known.unwrap_or_else(|| guess_below(named.height));
            self.later.push(Named {
                id: *id,
                kind,
                height,
                way: Way::hidden(),
            });
        }
        let gone = Gone {
            kind: named.kind,
            height: named.height,
            at,
            children,
        };
        self.survey.gone.insert(named.id, gone);
    }
}

impl Survey {
    /// Walks from `root` down through the nodes found. `old` is the rest of old tables.
    pub(crate) fn of(
        dev: &dyn Device,
        found: &FoundNodes,
        old: &[OldTable],
        root: Option<NodeId>,
    ) -> Self {
        let survey = Self {
            lost: Vec::new(),
            is_live: vec![false; found.count()],
            gone: HashMap::new(),
        };
        let root = root.and_then(|id| found.position(id));
        let root = root.map(|at| found.node(at)).map(|root| Named {
            id: root.id,
            kind: root.kind,
            height: root.height,
            way: Way::root(),
        });
        let mut walk = FirstWalk {
            dev,
            found,
            old,
            survey,
            todo: root.into_iter().collect(),
            later: Vec::new(),
        };
        walk.run();
        walk.survey
    }

    /// Positions of the nodes that lie there.
    pub(crate) fn live(&self) -> Vec<usize> {
        let live = self.is_live.iter().enumerate();
        live.filter(|(_, is_live)| **is_live)
            .map(|(at, _)| at)
            .collect()
    }

    /// Visits each node below `root` once, behind all nodes that it names.
    ///
    /// # Errors
    /// `Io` when the nodes are not as they were in the first walk, and those of `visit`.
    pub(crate) fn fill(
        &self,
        dev: &dyn Device,
        found: &FoundNodes,
        root: Option<NodeId>,
        visit: &mut dyn FnMut(Item<'_>) -> Result<()>,
    ) -> Result<()> {
        let mut seen = vec![false; self.is_live.len()];
        let mut seen_lost = HashSet::new();
        let mut steps: Vec<Step> = root.into_iter().map(Step::Enter).collect();
        while let Some(step) = steps.pop() {
            let id = match step {
                Step::Leave(id, names) => {
                    visit(self.item(found, id, names)?)?;
                    continue;
                }
                Step::Enter(id) => id,
            };
            let gone = self.gone.get(&id);
            let at = gone.map_or_else(|| found.position(id), |gone| gone.at);
            let is_new = match at {
                Some(at) => !std::mem::replace(&mut seen[at], true),
                None => seen_lost.insert(id),
            };
            if !is_new {
                continue;
            }
            let below = match (gone, at.filter(|at| self.is_live[*at])) {
                (Some(gone), _) => gone.children.clone(),
                (None, Some(at)) => names_again(dev, found.node(at))?,
                (None, None) => return Err(changed(0, "a node that nothing named before")),
            };
            steps.push(Step::Leave(id, below.clone()));
            steps.extend(below.into_iter().rev().map(Step::Enter));
        }
        Ok(())
    }

    fn item<'a>(&self, found: &'a FoundNodes, id: NodeId, names: Vec<NodeId>) -> Result<Item<'a>> {
        let gone = self.gone.get(&id);
        let at = gone.map_or_else(|| found.position(id), |gone| gone.at);
        Ok(match (gone, at.map(|at| found.node(at))) {
            (None, Some(node)) => Item::Found(node, names),
            (Some(_), Some(node)) => Item::Unreadable(node, names),
            (Some(gone), None) => Item::Lost(id, gone.kind, gone.height, names),
            (None, None) => return Err(changed(0, "a node that was not found")),
        })
    }
}

fn names_again(dev: &dyn Device, node: &Trailer) -> Result<Vec<NodeId>> {
    let mut names = Vec::new();
    names_of(dev, node, &mut |_, _, child| names.push(child.id()))
        .map_err(|error| changed(node.place.addr(), &error.to_string()))?;
    Ok(names)
}

/// The device answers otherwise than a moment before.
fn changed(addr: u64, detail: &str) -> Error {
    let error = std::io::Error::other(format!("it was another one before: {detail}"));
    io_error_at(Call::Read, "a node", addr)(error)
}
