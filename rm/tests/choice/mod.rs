//! Placement by an external chooser that the policy names.

use crate::common::{Bed, request, rm as own, world};
use bytes::Bytes;
use pvm_rm::decide::{Choice, ChoiceName, Choices, Offer, Policy};
use pvm_rm::policy::Conduct;
use pvm_rm::service::{Options, Service, ServiceError, TAG_POLICY};
use sempa_proto::PvmError;
use sempa_proto::rm::CTX_RM;
use sempa_proto::task::{SPAWN_HOST, SpawnRequest};
use std::sync::Arc;

/// Chooses the host with the highest number, for two tasks at most.
struct Last;

impl Choice for Last {
    fn name(&self) -> &str {
        "last"
    }

    fn choose(
        &self,
        request: &SpawnRequest,
        offers: &[Offer<'_>],
        count: usize,
    ) -> Result<Vec<usize>, String> {
        if request.file == "unwanted" {
            return Err("it has no reservation".into());
        }
        let last = (0..offers.len())
            .max_by_key(|i| offers[*i].host.id)
            .ok_or("nothing is offered")?;
        Ok(vec![last; count.min(2)])
    }
}

fn by(name: &str) -> Conduct {
    Conduct {
        placing: Policy::Choice(ChoiceName::new(name).expect("a name")),
        ..Conduct::default()
    }
}

fn options(name: &str) -> Options {
    let (conduct, choices) = (by(name), Choices::new([Arc::new(Last) as Arc<dyn Choice>]));
    Options {
        conduct,
        given: conduct,
        choices,
        watchers: true,
        policy_file: "rm.toml".into(),
        ..Options::default()
    }
}

/// A policy may name an external chooser, whose choice is checked and reported.
#[test]
fn external_choice_is_checked_and_reported() {
    let vm = world(3);
    let mut bed = Bed::quiet_with(&vm, options("last"));
    bed.owner_comes(3);
    bed.world().spawn(1, &request(3));
    bed.settle();
    let execs = bed.world().took_execs();
    let places: Vec<(u16, u32)> = execs
        .iter()
        .map(|exec| (exec.host.index(), exec.request.count))
        .collect();
    assert_eq!(places, [(2, 2)], "h3 was not offered");
    execs.iter().for_each(|exec| drop(bed.world().ack(exec)));
    bed.settle();
    let answer = bed.world().answer(1).expect("answered").expect("good");
    assert_eq!(answer[2], Err(PvmError::OutOfRes), "he has places for two");
    let told: Vec<String> = bed
        .world()
        .records
        .iter()
        .map(ToString::to_string)
        .collect();
    assert!(
        told.iter()
            .any(|text| text.contains("chosen by last; room for 2 of 3")),
        "{told:?}"
    );
    bed.world().spawn(
        2,
        &SpawnRequest {
            file: "unwanted".into(),
            ..request(1)
        },
    );
    bed.settle();
    assert_eq!(
        bed.world().answer(2).expect("answered").expect("tried"),
        [Err(PvmError::OutOfRes)]
    );
    let notes = bed.world().notes();
    assert!(
        notes
            .iter()
            .any(|note| note.contains("last chose no host: it has no reservation")),
        "{notes:?}"
    );
    // A request that names a host does not reach the chooser.
    bed.world().spawn(
        3,
        &SpawnRequest {
            flags: SPAWN_HOST,
            place: "h1".into(),
            ..request(1)
        },
    );
    bed.settle();
    assert_eq!(bed.world().took_execs()[0].host.index(), 1);
}

/// A policy that names an unknown chooser is refused, and the error lists the available ones.
#[test]
fn unknown_chooser_is_refused() {
    let error = Service::start(world(1), options("slurm"))
        .map(|_| ())
        .expect_err("nobody is called so");
    assert!(
        matches!(&error, ServiceError::Choice(no) if no.name == "slurm" && no.there == "there are last"),
        "{error}"
    );
    let vm = world(3);
    let mut bed = Bed::quiet_with(
        &vm,
        Options {
            choices: Choices::default(),
            ..options("last").with(Policy::Load)
        },
    );
    let change = |bed: &mut Bed, text: &'static str| {
        bed.world().post(
            own(),
            CTX_RM,
            TAG_POLICY,
            0,
            Bytes::from_static(text.as_bytes()),
        );
        bed.settle();
        bed.world().notes().pop().unwrap_or_default()
    };
    let told = change(&mut bed, "placing = \"choice:last\"\n");
    assert!(
        told.contains("rm.toml: the policy names the chooser \"last\", but this resource manager has no chooser"),
        "{told}"
    );
    assert!(told.ends_with("and the policy is unchanged"), "{told}");
    bed.world().spawn(1, &request(3));
    bed.settle();
    assert_eq!(bed.world().took_execs().len(), 3, "by load as before");
}

/// Replaces the placement policy of options.
trait With {
    fn with(self, placing: Policy) -> Self;
}

impl With for Options {
    fn with(self, placing: Policy) -> Options {
        let conduct = Conduct {
            placing,
            ..self.conduct
        };
        Options {
            conduct,
            given: conduct,
            ..self
        }
    }
}
