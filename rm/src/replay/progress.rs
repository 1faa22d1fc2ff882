//! The progress of a replay.

use sempa_proto::Micros;
use std::fmt;
use std::rc::Rc;

/// How far a replay is, in the time of the recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplayProgress {
    /// Time since the first entry of the recording.
    pub replayed: Micros,
    /// Time from the first to the last entry of the recording. A replay may take longer, because
    /// tasks may still run then.
    pub recorded: Micros,
}

/// A function that is called whenever the time of a replay advances.
#[derive(Clone, Default)]
pub(super) struct Observer(Option<Rc<dyn Fn(ReplayProgress)>>);

impl Observer {
    pub(super) fn new(observe: impl Fn(ReplayProgress) + 'static) -> Self {
        Self(Some(Rc::new(observe)))
    }

    pub(super) fn report(&self, progress: ReplayProgress) {
        if let Some(observe) = &self.0 {
            observe(progress);
        }
    }
}

impl fmt::Debug for Observer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Observer({})", self.0.is_some())
    }
}
