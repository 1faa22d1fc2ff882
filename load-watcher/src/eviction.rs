//! Whether guests can leave this host, and why not. Pure.

use sempa_proto::owner::{EvictionMode, GuestAccess};
use std::fmt;

/// State of the engine that dumps and restores tasks, as far as known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EngineState {
    Works,
    /// No task can be dumped here; contains the reason.
    Missing(String),
    Unknown,
}

/// The means by which guests leave a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EvictionMeans {
    /// True if a resource manager runs.
    pub has_rm: bool,
    /// True if the virtual machine has another host.
    pub has_other_hosts: bool,
    pub engine: EngineState,
}

/// The reason why no guest can leave this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EvictionObstacle {
    NoResourceManager,
    /// The virtual machine has no other host.
    OnlyHost,
    /// No task can be dumped here; contains the reason.
    NoEngine(String),
}

impl fmt::Display for EvictionObstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoResourceManager => {
                f.write_str("no resource manager runs that would migrate them")
            }
            Self::OnlyHost => f.write_str("the virtual machine has no other host"),
            Self::NoEngine(reason) => write!(f, "tasks cannot be migrated from here: {reason}"),
        }
    }
}

impl EvictionMeans {
    /// Returns the reason why no guest can leave although guests must leave now or later; `None`
    /// if guests may stay, can leave, or will be ended.
    pub fn obstacle(&self, access: GuestAccess) -> Option<EvictionObstacle> {
        let GuestAccess::Paused {
            evict_at: Some(_),
            eviction,
        } = access
        else {
            return None;
        };
        // The daemon ends guests by itself.
        if eviction == EvictionMode::Kill {
            return None;
        }
        match &self.engine {
            _ if !self.has_rm => Some(EvictionObstacle::NoResourceManager),
            EngineState::Missing(reason) => Some(EvictionObstacle::NoEngine(reason.clone())),
            // A checkpoint needs no other host.
            _ if !self.has_other_hosts && eviction == EvictionMode::Move => {
                Some(EvictionObstacle::OnlyHost)
            }
            EngineState::Works | EngineState::Unknown => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sempa_proto::Micros;

    /// The first obstacle is named. Guests that may stay or are ended need no means to leave.
    #[test]
    fn obstacles_to_leaving_are_named() {
        let means = |has_rm, has_other_hosts, engine: &EngineState| EvictionMeans {
            has_rm,
            has_other_hosts,
            engine: engine.clone(),
        };
        let paused = |evict_at: Option<u64>, eviction| GuestAccess::Paused {
            evict_at: evict_at.map(Micros),
            eviction,
        };
        let (moves, missing) = (
            paused(Some(5), EvictionMode::Move),
            EngineState::Missing("no CRIU".into()),
        );
        let works = EngineState::Works;
        let text = |means: EvictionMeans, access| {
            means.obstacle(access).map(|obstacle| obstacle.to_string())
        };
        let contains = |text: Option<String>, part: &str| text.is_some_and(|t| t.contains(part));
        assert!(contains(
            text(means(false, false, &missing), moves),
            "no resource manager"
        ));
        assert!(contains(
            text(means(true, false, &missing), moves),
            "no CRIU"
        ));
        assert!(contains(
            text(means(true, false, &works), moves),
            "no other host"
        ));
        for engine in [works.clone(), EngineState::Unknown] {
            assert_eq!(text(means(true, true, &engine), moves), None);
        }
        let checkpoints = paused(Some(5), EvictionMode::Checkpoint);
        assert_eq!(text(means(true, false, &works), checkpoints), None);
        assert!(text(means(false, true, &works), checkpoints).is_some());
        for access in [
            GuestAccess::Welcome,
            paused(None, EvictionMode::Move),
            paused(Some(5), EvictionMode::Kill),
        ] {
            assert_eq!(
                text(means(false, false, &missing), access),
                None,
                "{access:?}"
            );
        }
    }
}
