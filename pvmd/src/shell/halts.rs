//! Where tests have this daemon stand still: before a step of a move begins, and at its end before anybody is told of it. So a
//! fault meets the move at exactly this point, whatever the machine is busy with.

use super::daemon::variable;
use nix::sys::signal::{Signal, raise};
use sempa_proto::Tid;
use sempa_proto::migration::Step;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;

/// The folder that has a file `TID-before-STEP` for each step before which some daemon is to stand still, and `TID-STEP` for each at
/// whose end. A file `TID-places` gets a line for each of these places that a daemon comes to. Set by tests only.
const FOLDER: &str = "SEMPA_TEST_STEPS";

/// Which end of a step.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Edge {
    /// Nothing of it is done.
    Before,
    /// Nobody has been told that it is done.
    After,
}

/// The halts that somebody has asked for.
#[derive(Debug)]
pub(crate) struct Halts {
    folder: Option<PathBuf>,
}

impl Halts {
    /// None, unless the environment names a folder.
    pub(crate) fn from_environment() -> Halts {
        Halts {
            folder: variable(FOLDER).map(PathBuf::from),
        }
    }

    /// Has this process stop, if somebody wants that here, until it is told to go on. It tells by the name of the file, which
    /// gets `.reached` at its end: whoever comes first stops.
    pub(crate) fn at(&self, tid: Tid, edge: Edge, step: Step) {
        let Some(folder) = &self.folder else { return };
        let edge = match edge {
            Edge::Before => "before-",
            Edge::After => "",
        };
        if let Ok(mut places) = OpenOptions::new()
            .append(true)
            .open(folder.join(format!("{tid}-places")))
        {
            // The test that reads them misses a line.
            let _ = places.write_all(format!("{edge}{step}\n").as_bytes());
        }
        let wanted = folder.join(format!("{tid}-{edge}{step}"));
        if std::fs::rename(&wanted, wanted.with_extension("reached")).is_ok() {
            // Nothing is lost if it fails: the test that waits for this says so.
            let _ = raise(Signal::SIGSTOP);
        }
    }
}
