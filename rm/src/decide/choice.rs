//! Places chosen by somebody else: a batch system that has reserved hosts, or any other rule. Its word is checked; the
//! decision stays ours, and so does its sentence.

use super::{HostView, Share};
use sempa_proto::task::SpawnRequest;

/// A host that the request allows and that is free.
#[derive(Clone, Copy, Debug)]
pub struct Offer<'a> {
    /// The host.
    pub host: &'a HostView,
    /// What one more task would get there.
    pub share: Share,
    /// Tasks that it can take at most.
    pub capacity: u32,
}

/// Somebody who chooses hosts.
pub trait Choice {
    /// Who it is, for sentences.
    fn name(&self) -> &str;
    /// Hosts for the tasks of one spawn: indices into `offers`, one for each task, in the order of the tasks. Fewer than
    /// `count` leave the last tasks without a place.
    ///
    /// # Errors
    /// Why there is none; the tasks are not placed.
    fn choose(&self, request: &SpawnRequest, offers: &[Offer<'_>], count: usize) -> Result<Vec<usize>, String>;
}
