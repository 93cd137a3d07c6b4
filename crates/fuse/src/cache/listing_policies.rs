//! The choices of the server when a program reads a directory.

use crate::cache::first_entry_policy::FirstEntryPolicy;
use crate::cache::readdirplus_policy::ReaddirplusPolicy;

/// The policies for READDIRPLUS.
#[derive(Default)]
pub(crate) struct ListingPolicies {
    pub(crate) attributes: ReaddirplusPolicy,
    pub(crate) first_entry: FirstEntryPolicy,
}
