//! A stream that a command takes section by section: the trees that it asked for, and the sender of
//! them.

use std::collections::BTreeSet;
use std::sync::Arc;

use ramet_betree::window;
use ramet_block::Uuid;

use crate::error::{Error, Result};
use crate::format::ino::Ino;
use crate::format::name::check_name;
use crate::format::record::Kind;
use crate::format::stream::StreamId;
use crate::namespace::resolve::Namespace;
use crate::ops::snapshots::{Snapshots, Viewed};
use crate::ops::then::{Then, names_of};
use crate::tools::diff::{Side, live_sides_of};
use crate::tools::send::{Sender, SentRoot, id_of_snapshot};
use crate::tools::send_calls::{SendPage, Told};

/// Trees of one stream, at most.
const ROOTS_MAX: usize = 65536;

/// A tree of a snapshot, and its identity.
type OfSnapshot = (StreamId, Arc<Side>);

/// A snapshot, and a path in it.
type Place<'a> = (&'a str, &'a [u8]);

/// A tree that was asked for.
struct Asked {
    name: Vec<u8>,
    /// The tree; a directory of today until the first section.
    tree: std::result::Result<OfSnapshot, Ino>,
    base: Option<OfSnapshot>,
}

/// See the module.
#[derive(Default)]
pub(crate) struct Sending {
    asked: Vec<Asked>,
    /// Their names. A receiver would have one place for two trees of one name.
    names: BTreeSet<Vec<u8>>,
    /// They keep the snapshots from being removed.
    views: Vec<Viewed>,
    sender: Option<Sender>,
    told: Told,
    stream: StreamId,
}

impl Sending {
    /// Adds a tree: that of a snapshot, or the directory `dir` of today.
    ///
    /// # Errors
    /// `NotFound`, `NotDirectory`, `Exists` for the name of a tree before, `Invalid` for a name that no
    /// entry can have or after the first section, and those of the tree.
    pub(crate) fn add(
        &mut self,
        (namespace, snapshots): (&Namespace, &Snapshots),
        (name, dir): (&[u8], Ino),
        (at, base): (Option<Place<'_>>, Option<Place<'_>>),
    ) -> Result<()> {
        check_name(name)?;
        if self.sender.is_some() || self.asked.len() >= ROOTS_MAX {
            return Err(Error::Invalid("a tree too many"));
        }
        if !self.names.insert(name.to_vec()) {
            return Err(Error::Exists);
        }
        let base = base.map(|place| self.then(snapshots, place)).transpose()?;
        let tree = match at {
            Some(place) => Ok(self.then(snapshots, place)?),
            None => Err(namespace.dir(dir)?.ino),
        };
        self.asked.push(Asked {
            name: name.to_vec(),
            tree,
            base,
        });
        Ok(())
    }

    /// The directory at `path` in a snapshot.
    fn then(&mut self, snapshots: &Snapshots, (name, path): (&str, &[u8])) -> Result<OfSnapshot> {
        let entry = snapshots.find(name)?;
        let (view, base) = snapshots.view(name)?;
        // Another snapshot may have got the name in between.
        if view.id() != entry.id {
            return Err(Error::NotFound);
        }
        let tree = window(snapshots.tree(), base).snapshot();
        let names = names_of(path)?;
        let then = Then::find(&tree, &names)?.ok_or(Error::NotFound)?;
        if then.record.kind() != Kind::Directory {
            return Err(Error::NotDirectory);
        }
        let volume = snapshots.tree().stats().uuid;
        let id = id_of_snapshot(volume.0, &entry, &names.join(&b'/'));
        self.views.push(view);
        Ok((id, Arc::new(Side::of_then(&tree, &then))))
    }

    /// Begins to send the trees that were asked for, all directories of today as of one moment.
    fn begin(&mut self, namespace: &Namespace) -> Result<Sender> {
        let asked = std::mem::take(&mut self.asked);
        let today = asked.iter().filter_map(|one| one.tree.as_ref().err());
        let today: Vec<_> = today
            .map(|dir| namespace.dir(*dir))
            .collect::<Result<_>>()?;
        let sides = live_sides_of(namespace, &today.iter().collect::<Vec<_>>())?;
        let mut sides = sides.into_iter();
        let root = |one: Asked| -> Result<SentRoot> {
            let (id, side) = match one.tree {
                Ok(then) => then,
                Err(_) => {
                    let id = Uuid::random().map_err(|_| Error::Invalid("no random numbers"))?;
                    let side = sides.next().ok_or(Error::Stale)?;
                    (StreamId(id.0).made_once(), Arc::new(side))
                }
            };
            Ok(SentRoot {
                name: one.name,
                id,
                side,
                base: one.base,
            })
        };
        let roots = asked.into_iter().map(root).collect::<Result<Vec<_>>>()?;
        Sender::new(namespace.tree.budget(), roots)
    }

    /// The next page, and whether the stream ends with it.
    ///
    /// # Errors
    /// `Invalid` behind the end of the stream, and those of the tree. The stream cannot go on then.
    pub(crate) fn next_page(&mut self, namespace: &Namespace) -> Result<(SendPage, bool)> {
        if self.sender.is_none() {
            let sender = self.begin(namespace)?;
            self.stream = sender.id();
            self.sender = Some(sender);
        }
        let sender = self.sender.as_mut().ok_or(Error::Stale)?;
        if self.told.is_done() {
            let section = sender.next_section()?;
            self.told = Told::of(section.ok_or(Error::Invalid("the stream has ended"))?);
        }
        let items = self.told.next_part();
        let (ends_section, is_last) = (self.told.is_done(), sender.is_done());
        let page = SendPage {
            stream: self.stream,
            items,
            ends_section,
            ends_stream: is_last,
        };
        Ok((page, ends_section && is_last))
    }
}
