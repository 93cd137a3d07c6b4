//! The choices that the kernel leaves to the server when a program reads a directory.

use crate::cache::first_entry_policy::FirstEntryPolicy;
use crate::cache::readdirplus_policy::ReaddirplusPolicy;

/// The policies for READDIRPLUS where the kernel leaves the choice to the server.
#[derive(Default)]
pub(crate) struct ListingPolicies {
    pub(crate) attributes: ReaddirplusPolicy,
    pub(crate) first_entry: FirstEntryPolicy,
}
