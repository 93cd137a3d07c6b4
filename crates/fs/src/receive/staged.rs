//! The names in a stage, and the state of a receiver at a checkpoint.

use std::collections::BTreeMap;

use ramet_block::{Reader, Writer};

use crate::format::stream::{StreamId, StreamItem, StreamItems};
use crate::receive::error::{ReceiveError, Received};

/// Beginning of the name of a stage.
pub(crate) const STAGE: &str = ".ramet-receive-";
/// Longest state of a checkpoint, in bytes.
pub(crate) const STATE_BYTES_MAX: u64 = 32 << 20;
const AT: &str = "at-";
const OUT: &str = "out-";
const GIVES: &str = "gives-";

/// A root of the stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Root {
    pub(crate) name: Vec<u8>,
    pub(crate) id: StreamId,
    pub(crate) base: Option<StreamId>,
}

/// The name of the stage of a stream.
pub(crate) fn stage_of(stream: StreamId) -> String {
    format!("{STAGE}{stream}")
}

/// The name in the stage of a root that is about to get its name.
pub(crate) fn out(root: usize) -> Vec<u8> {
    format!("{OUT}{root}").into_bytes()
}

/// The name of the mark that the directory with this inode number is about to get the name of this
/// root.
pub(crate) fn mark(root: usize, number: u64) -> Vec<u8> {
    format!("{GIVES}{root}-{number}").into_bytes()
}

/// The names in a stage.
#[derive(Default)]
pub(crate) struct Staged {
    pub(crate) names: Vec<Vec<u8>>,
    /// The last checkpoint: the section that it is behind, and its name.
    pub(crate) checkpoint: Option<(u64, Vec<u8>)>,
    /// The inode numbers of the marks, by root.
    pub(crate) given: BTreeMap<usize, u64>,
}

impl Staged {
    pub(crate) fn of(names: Vec<Vec<u8>>) -> Self {
        let text = |name: &Vec<u8>| String::from_utf8(name.clone()).ok();
        let sections = names.iter().filter_map(|name| {
            let section = text(name)?.strip_prefix(AT)?.parse().ok()?;
            Some((section, name.clone()))
        });
        let given = names.iter().filter_map(|name| {
            let name = text(name)?;
            let (root, number) = name.strip_prefix(GIVES)?.split_once('-')?;
            Some((root.parse().ok()?, number.parse().ok()?))
        });
        let (checkpoint, given) = (sections.max(), given.collect());
        Self {
            names,
            checkpoint,
            given,
        }
    }

    /// The names that have no use for a receiver that goes on from the last checkpoint.
    pub(crate) fn passing(&self) -> impl Iterator<Item = &[u8]> {
        let last = self.checkpoint.as_ref().map(|(_, name)| name);
        let is_kept = move |name: &Vec<u8>| {
            let is_of_end = [OUT, GIVES].map(|prefix| name.starts_with(prefix.as_bytes()));
            last.is_some_and(|last| last == name || is_of_end.contains(&true))
        };
        let names = self.names.iter().filter(move |name| !is_kept(name));
        names.map(|name| &name[..])
    }
}

/// The state of a receiver at a checkpoint.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct State {
    /// Checksum of the section before.
    pub(crate) sum: u64,
    pub(crate) items: u64,
    /// The root that was being received.
    pub(crate) root: Option<usize>,
    pub(crate) roots: Vec<Root>,
}

impl State {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut w = Writer::new();
        w.u64(self.sum);
        w.u64(self.items);
        w.u64(self.root.map_or(0, |root| root as u64 + 1));
        for root in &self.roots {
            let (name, id, base) = (&root.name[..], root.id, root.base);
            StreamItem::Root { name, id, base }.encode(&mut w);
        }
        w.into_vec()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Received<Self> {
        const DAMAGED: ReceiveError = ReceiveError::Order(
            "the state of the stage is damaged: 'ramet receive --discard' removes it",
        );
        let mut r = Reader::new(bytes);
        let mut number = || r.u64().map_err(|_| DAMAGED);
        let (sum, items, root) = (number()?, number()?, number()?);
        let mut rest = StreamItems::new(bytes.get(24..).unwrap_or_default());
        let mut roots = Vec::new();
        while let Some(item) = rest.next_item()? {
            let StreamItem::Root { name, id, base } = item else {
                return Err(DAMAGED);
            };
            let name = name.to_vec();
            roots.push(Root { name, id, base });
        }
        let root = root.checked_sub(1).map(|root| root as usize);
        if root.is_some_and(|root| root >= roots.len()) {
            return Err(DAMAGED);
        }
        Ok(Self {
            sum,
            items,
            root,
            roots,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_comes_back() {
        let root = |name: &[u8], base| Root {
            name: name.to_vec(),
            id: StreamId([1; 16]),
            base,
        };
        let state = State {
            sum: 9,
            items: 70,
            root: Some(1),
            roots: vec![root(b"a", None), root(b"b", Some(StreamId([2; 16])))],
        };
        let bytes = state.encode();
        assert_eq!(State::decode(&bytes).unwrap(), state);
        assert!(State::decode(&bytes[..bytes.len() - 1]).is_err());
        assert!(State::decode(&bytes[..10]).is_err());
    }

    #[test]
    fn names_tell_the_last_checkpoint_and_the_marks() {
        let names = [
            "at-9",
            "at-10",
            "now",
            "out-2",
            "gives-2-77",
            "at-x",
            "gives-2",
        ];
        let names: Vec<_> = names.iter().map(|name| name.as_bytes().to_vec()).collect();
        let staged = Staged::of(names);
        assert_eq!(staged.checkpoint, Some((10, b"at-10".to_vec())));
        assert_eq!(staged.given, BTreeMap::from([(2, 77)]));
        assert_eq!(
            (out(2), mark(2, 77)),
            (b"out-2".to_vec(), b"gives-2-77".to_vec())
        );
        let passing: Vec<_> = staged.passing().collect();
        assert_eq!(passing, [&b"at-9"[..], b"now", b"at-x"]);
        let without = Staged::of(vec![b"now".to_vec(), b"out-0".to_vec()]);
        assert_eq!(without.passing().count(), 2);
    }
}
