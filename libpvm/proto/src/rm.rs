//! What the resource manager of Sempa answers when it is asked why, how much, and what a job is.
//!
//! A question is a message to the resource manager in context [`CTX_RM`] with tag [`TAG_ASK`], its answer one with tag
//! [`TAG_ANSWER`] and the question's wait id. Both bodies are raw bytes: the version of this protocol as two bytes, low one
//! first, then [`Question`] or [`Answer`] in postcard. Who is asked in another version answers [`Answer::Version`], whose
//! encoding never changes. A resource manager that is not ours leaves such messages alone; who asks gives up after a time.
//!
//! Hosts appear by name, because a decision is asked about when its hosts may be gone.

mod decided;

pub use decided::Decided;

use crate::event::describe_status;
use crate::frame::{FrameError, from_bytes, to_bytes};
use crate::ids::{Micros, Tid};
use crate::migration::Usage;
use crate::suspend;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::fmt;

/// Version of questions, answers and decisions.
pub const RM_VERSION: u16 = 6;
/// Context of everything that comes to the resource manager beside PVM's documented messages.
pub const CTX_RM: i32 = 0x7ffe0;
/// Tag of questions.
pub const TAG_ASK: i32 = 10;
/// Tag of answers.
pub const TAG_ANSWER: i32 = 11;
/// Hosts that one decision lists as not used; of the others it gives the number.
pub const NOT_USED_MAX: usize = 64;
/// Entries in one answer at most; the newest are given.
pub const ANSWER_ENTRIES_MAX: usize = 1000;

/// What can be asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Question {
    /// The decisions about a task, or about a job and its tasks. → [`Answer::Why`]
    WhyTask(Tid),
    /// The decisions about a host, by its name. → [`Answer::Why`]
    WhyHost(String),
    /// What users have used. → [`Answer::Users`]
    Users {
        /// Only this one.
        user: Option<u32>,
    },
    /// Jobs. → [`Answer::Jobs`]
    Jobs {
        /// Only this user's.
        user: Option<u32>,
    },
    /// One job and its tasks; any of its tasks may be named. → [`Answer::Job`]
    Job(Tid),
    /// Suspend a job with all its tasks, and those that it will have, or let it go on; any of its tasks may be named.
    /// → [`Answer::Suspended`]
    Suspend {
        /// The job.
        job: Tid,
        /// False: let it go on.
        suspend: bool,
    },
    /// Have all tasks leave a host, and keep others away. → [`Answer::Drain`]
    Drain {
        /// The host's name.
        host: String,
        /// It is to be empty within this time; what is left by then is told.
        within: Option<Micros>,
    },
    /// Let a host take tasks again. → [`Answer::Drain`], with whatever is there
    Undrain {
        /// The host's name.
        host: String,
    },
    /// How far is it? → [`Answer::Drain`]
    Draining {
        /// The host's name.
        host: String,
    },
    /// Do not start a job again that was checkpointed and ended to wait for room; any of its tasks may be named.
    /// → [`Answer::Unparked`]
    Unpark(Tid),
    /// End all tasks of a job, and those that are just being started; any of its tasks may be named. They are asked to end, and
    /// ended after a time. → [`Answer::Killed`], as far as it is by then
    Kill(Tid),
    /// How far is it? → [`Answer::Killed`]
    Killed(Tid),
    /// Spawns that wait for a place. → [`Answer::Waiting`]
    Waiting {
        /// Only this user's.
        user: Option<u32>,
    },
}

/// What is answered. New kinds go to the end: [`Answer::Version`] is the first for ever.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Answer {
    /// The question was not understood: the version that is.
    Version(u16),
    /// Decisions, the oldest first.
    Why {
        /// What is known of the task, if one was asked about.
        task: Option<TaskUse>,
        /// The decisions.
        decisions: Vec<Decision>,
        /// What holds of the host now, if one was asked about.
        now: Option<HostNow>,
    },
    /// Users, by rising number.
    Users(Vec<UserUse>),
    /// Jobs, the oldest first.
    Jobs(Vec<JobUse>),
    /// A job and its tasks, the oldest first.
    Job {
        /// The job.
        job: JobUse,
        /// Its tasks.
        tasks: Vec<TaskUse>,
    },
    /// Nothing is known of it.
    Unknown,
    /// A job is suspended, or goes on.
    Suspended {
        /// The job.
        job: Tid,
        /// Its tasks that stand still from now on, or go on.
        tasks: Vec<Tid>,
        /// Its tasks that are as they were, and why; [`ANSWER_ENTRIES_MAX`] of them at most.
        others: Vec<(Tid, String)>,
    },
    /// A host that is emptied, or is not any more.
    Drain {
        /// It is being emptied, or kept empty.
        drained: bool,
        /// The tasks that are there and that could leave, and why those stay that do not leave at present;
        /// [`ANSWER_ENTRIES_MAX`] of them at most.
        tasks: Vec<(Tid, Option<String>)>,
        /// Tasks that belong to the host or to nobody here, and stay until they end.
        stay: u32,
    },
    /// A job that waited for room does not wait any more.
    Unparked {
        /// The first task of it.
        job: Tid,
        /// Its checkpoint, which stays.
        set: String,
        /// It is just being started: nothing can be called off.
        starting: bool,
    },
    /// A job is being ended.
    Killed {
        /// The job.
        job: Tid,
        /// Its tasks that were asked to end.
        asked: u32,
        /// Those of them that did not, and were ended.
        forced: u32,
        /// What is left of it: tasks, and requests for tasks.
        left: u32,
        /// Tasks to which no signal could be sent, and why; [`ANSWER_ENTRIES_MAX`] of them at most.
        failed: Vec<(Tid, String)>,
    },
    /// Spawns that wait, whose turn it is first; [`ANSWER_ENTRIES_MAX`] of them at most.
    Waiting(Vec<Waits>),
}

/// Writes a question or an answer down.
///
/// # Errors
/// When it cannot be encoded.
pub fn pack<T: Serialize>(what: &T) -> Result<Vec<u8>, FrameError> {
    let mut out = RM_VERSION.to_le_bytes().to_vec();
    out.extend(to_bytes(what)?);
    Ok(out)
}

/// Reads a question or an answer. `None` for one of another version.
///
/// # Errors
/// When the bytes are neither.
pub fn unpack<T: DeserializeOwned>(bytes: &[u8]) -> Result<Option<T>, FrameError> {
    let Some((version, rest)) = bytes.split_first_chunk::<2>() else {
        return Err(FrameError::BadBody("it has no version".into()));
    };
    if u16::from_le_bytes(*version) != RM_VERSION {
        return Ok(None);
    }
    from_bytes(rest).map(Some)
}

/// The version that an answer of another version names, if it is such an answer.
pub fn version_of(bytes: &[u8]) -> Option<u16> {
    bytes
        .first_chunk::<2>()
        .map(|version| u16::from_le_bytes(*version))
}

/// How a task ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum End {
    /// By itself or by a signal.
    Status(i32),
    /// With its host, or while nobody watched.
    Lost,
}

impl End {
    /// True for exit status 0.
    pub fn is_good(self) -> bool {
        self == End::Status(0)
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            End::Status(status) => f.write_str(&describe_status(*status)),
            End::Lost => f.write_str("lost"),
        }
    }
}

/// Since when something is suspended, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Suspended {
    /// Since when, in microseconds since 1970.
    pub since: Micros,
    /// Why.
    pub cause: suspend::Cause,
}

impl fmt::Display for Suspended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.cause {
            suspend::Cause::Asked { by } | suspend::Cause::Job { by } => {
                write!(f, "suspended by {by}")
            }
            suspend::Cause::Share { why } => write!(f, "gives way: {why}"),
        }
    }
}

/// What is kept of a task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TaskUse {
    /// The task.
    pub tid: Tid,
    /// The task at the top of its job.
    pub job: Tid,
    /// Its user.
    pub user: u32,
    /// Its program; empty for one from a command line.
    pub program: String,
    /// Name of the host where it runs, or ran last.
    pub host: String,
    /// When it began, in microseconds since 1970.
    pub began: Micros,
    /// When and how it ended.
    pub ended: Option<(Micros, End)>,
    /// What it used; known when it has ended.
    pub used: Usage,
    /// Moves.
    pub moves: u32,
    /// How often it had to go because of an owner: by a move, which counts there as well, or by its end.
    pub evictions: u32,
    /// It counts against the limits of its user and job.
    pub counted: bool,
    /// It is suspended.
    pub suspended: Option<Suspended>,
    /// How long it was suspended before that.
    pub stood: Micros,
}

/// What is kept of a job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobUse {
    /// The task at its top.
    pub job: Tid,
    /// Its user.
    pub user: u32,
    /// The program at its top; empty for one from a command line.
    pub program: String,
    /// When it began, in microseconds since 1970.
    pub began: Micros,
    /// When its last task ended; `None` while one runs.
    pub ended: Option<Micros>,
    /// What its tasks came to.
    pub sums: Sums,
    /// It is suspended, with all its tasks and those that it will have.
    pub suspended: Option<Suspended>,
}

/// What is kept of a user.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct UserUse {
    /// The user.
    pub user: u32,
    /// What the user's tasks came to.
    pub sums: Sums,
    /// The index of the Up-Down scheme; the lowest is served first.
    pub index: f64,
}

/// Sums over tasks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sums {
    /// Tasks begun.
    pub tasks: u64,
    /// Of them, those that run.
    pub running: u64,
    /// Those that ended otherwise than with status 0.
    pub failed: u64,
    /// Processor time and largest size of those that have ended.
    pub used: Usage,
    /// Time between begin and end of those that have ended, all together, without that for which they were suspended.
    pub wall: Micros,
    /// Moves.
    pub moves: u64,
    /// How often they had to go because of an owner: by a move, which counts there as well, or by their end.
    pub evictions: u64,
}

/// Something that was decided, or that happened and on which decisions rest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Decision {
    /// Rising.
    pub number: u64,
    /// When, in microseconds since 1970.
    pub at: Micros,
    /// What.
    pub what: Decided,
}

/// How places were chosen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Choice {
    /// The request names the host.
    Asked,
    /// One after another.
    InTurn,
    /// Where a task gets most of a processor.
    Load {
        /// The first host.
        host: String,
        /// Thousandths of an ordinary processor there.
        permille: u64,
    },
    /// By the number that the request prefers.
    Rank,
    /// All on one host.
    SameHost,
    /// Somebody else chose.
    Chosen,
    /// The user or the job has its share.
    Limit,
    /// The requirements are not understood.
    NotUnderstood,
    /// The request names no host of the virtual machine.
    NoSuchHost,
    /// No host is free.
    NoneFree,
}

/// One attempt to find places.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attempt {
    /// How.
    pub choice: Choice,
    /// The whole sentence.
    pub sentence: String,
    /// Hosts that were not used.
    pub not_used: Vec<NotUsed>,
}

/// A host that was not used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NotUsed {
    /// Its name.
    pub host: String,
    /// Why.
    pub why: Excluded,
}

/// Why a host was not used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Excluded {
    /// Another one was asked for.
    NotAsked,
    /// The architecture is another one.
    Arch {
        /// What the host is.
        has: String,
    },
    /// Its owner is there.
    Owner {
        /// The watcher's sentence.
        why: String,
    },
    /// A condition of the request does not hold there.
    Unmet {
        /// The condition.
        condition: String,
        /// What the host has instead.
        has: String,
    },
    /// It was lost or did not answer.
    NoAnswer,
    /// Something else.
    Other {
        /// The sentence.
        why: String,
    },
}

impl fmt::Display for Excluded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Excluded::NotAsked => f.write_str("another host was asked for"),
            Excluded::Arch { has } => write!(f, "its architecture is {has}"),
            Excluded::Owner { why } => write!(f, "its owner is there ({why})"),
            Excluded::Unmet { condition, has } => write!(f, "{condition} does not hold ({has})"),
            Excluded::NoAnswer => f.write_str("it did not answer"),
            Excluded::Other { why } => f.write_str(why),
        }
    }
}

/// What holds of a host now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum HostNow {
    /// It is not part of the virtual machine.
    Gone,
    /// Nothing is placed there.
    LeftOut {
        /// Why, whether it is emptied or not.
        why: Option<Excluded>,
        /// Who has it emptied.
        drained: Option<Tid>,
    },
    /// It is used; what there is to say of it all the same.
    Used(Vec<String>),
}

/// A spawn that waits for a place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waits {
    /// The program.
    pub program: String,
    /// Places that it needs.
    pub count: u32,
    /// The task that asked.
    pub by: Tid,
    /// Its job.
    pub job: Tid,
    /// Its user.
    pub user: u32,
    /// Since when, in microseconds since 1970.
    pub since: Micros,
    /// As the how manieth it is tried, from 1.
    pub turn: u32,
    /// What came of it when it was tried last.
    pub why: String,
}

/// What a move is expected to save and to cost, or has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Expected {
    /// What it saves all tasks concerned; 0 for moves that must be.
    pub gain: Micros,
    /// What it costs.
    pub cost: Micros,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_of_another_version_are_recognised_and_rubbish_is_an_error() {
        let bytes = pack(&Question::Jobs { user: Some(7) }).expect("it can be written");
        assert_eq!(
            unpack::<Question>(&bytes),
            Ok(Some(Question::Jobs { user: Some(7) }))
        );
        let mut newer = bytes.clone();
        newer[0] = 99;
        assert_eq!(
            (unpack::<Question>(&newer), version_of(&newer)),
            (Ok(None), Some(99))
        );
        assert!(unpack::<Question>(&bytes[..1]).is_err());
        assert!(unpack::<Question>(&bytes[..2]).is_err());
    }

    #[test]
    fn a_decision_is_about_its_tasks_and_the_hosts_that_it_used_or_left_out() {
        let (job, tid) = (Tid::from_raw(0x40001), Tid::from_raw(0x40002));
        let left_out = NotUsed {
            host: "h3".into(),
            why: Excluded::Owner {
                why: "olga on pts/1".into(),
            },
        };
        let not_asked = NotUsed {
            host: "h4".into(),
            why: Excluded::NotAsked,
        };
        let sentence = "largest share of a processor, 1.00 on h2".to_string();
        let choice = Choice::Load {
            host: "h2".into(),
            permille: 1000,
        };
        let what = Decided::Spawn {
            program: "worker".into(),
            by: job,
            job,
            user: 0,
            count: 1,
            started: vec![(tid, "h2".into())],
            error: None,
            waited: Micros::from_millis(1500),
            attempts: vec![Attempt {
                choice,
                sentence,
                not_used: vec![left_out, not_asked],
            }],
        };
        let is_about = |task: Tid| what.is_about(|one| one == task);
        assert!(is_about(tid) && is_about(job) && !is_about(Tid::from_raw(0x40003)));
        assert!(what.is_about_host("h2") && what.is_about_host("h3") && !what.is_about_host("h4"));
        assert_eq!(
            what.to_string(),
            "worker started for t40001 on h2: largest share of a processor, 1.00 on h2; it waited 1.5 s"
        );
    }
}
