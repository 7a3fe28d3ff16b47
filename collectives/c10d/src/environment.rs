//! Which rank this process is, from the variables of whoever started it.

use std::time::Duration;

use drivetrain_core::{Error, ErrorKind, Result};

use crate::rendezvous::Rendezvous;

/// The port where nothing says another: torchrun's.
const DEFAULT_PORT: u16 = 29500;

/// Keys of what [`variables`] names.
pub(crate) const OWN_RUN: &str = "drivetrain/0";

/// What a launcher says.
#[derive(Debug, Clone, PartialEq)]
pub struct Launched {
    /// Who started it: `torchrun`, `Slurm` or `Open MPI`.
    pub launcher: &'static str,
    /// This process's rank.
    pub rank: usize,
    /// Processes in all.
    pub world_size: usize,
    /// Its index among those of this machine.
    pub local_rank: usize,
    /// Processes on this machine.
    pub local_size: usize,
    /// The machine of whoever keeps the store.
    pub host: String,
    /// The store's port.
    pub port: u16,
    launcher_keeps_store: bool,
    name: String,
    interface: Option<String>,
}

/// A launcher's variables, the first that are there: torchrun's, a Slurm step's, Open MPI's. `None` where there are none,
/// or for one process alone: ranks are threads then.
///
/// # Errors
/// `Config` naming a variable that is missing beside the others, or is not what it should be.
pub fn find(variable: &dyn Fn(&str) -> Option<String>) -> Result<Option<Launched>> {
    let variables = Variables(variable);
    let launched = if variables.has("RANK") && variables.has("WORLD_SIZE") {
        torchrun(&variables)?
    } else if variables.has("SLURM_PROCID") && variables.has("SLURM_STEP_NUM_TASKS") {
        slurm(&variables)?
    } else if variables.has("OMPI_COMM_WORLD_RANK") {
        open_mpi(&variables)?
    } else {
        return Ok(None);
    };
    if launched.rank >= launched.world_size {
        let message = "a launcher gave a rank that is not below the number of processes";
        return Err(Error::new(ErrorKind::Config, "find_ranks", message)
            .with("launcher", launched.launcher)
            .with(
                "found",
                format!("{} of {}", launched.rank, launched.world_size),
            ));
    }
    Ok((launched.world_size > 1).then_some(launched))
}

impl Launched {
    /// Where this process meets the others.
    pub fn rendezvous(&self, meeting_timeout: Duration, timeout: Duration) -> Rendezvous {
        Rendezvous {
            rank: self.rank,
            world_size: self.world_size,
            host: self.host.clone(),
            port: self.port,
            launcher_keeps_store: self.launcher_keeps_store,
            name: self.name.clone(),
            meeting_timeout,
            timeout,
            interface: self.interface.clone(),
        }
    }
}

/// What a launcher's child of ours is told: torchrun's variables.
pub fn variables(
    rank: usize,
    world_size: usize,
    port: u16,
) -> impl Iterator<Item = (&'static str, String)> {
    [
        ("RANK", rank.to_string()),
        ("LOCAL_RANK", rank.to_string()),
        ("WORLD_SIZE", world_size.to_string()),
        ("LOCAL_WORLD_SIZE", world_size.to_string()),
        ("MASTER_ADDR", "127.0.0.1".to_owned()),
        ("MASTER_PORT", port.to_string()),
        ("TORCHELASTIC_USE_AGENT_STORE", "True".to_owned()),
        ("TORCHELASTIC_RUN_ID", "drivetrain".to_owned()),
        ("TORCHELASTIC_RESTART_COUNT", "0".to_owned()),
    ]
    .into_iter()
}

struct Variables<'a>(&'a dyn Fn(&str) -> Option<String>);

impl Variables<'_> {
    fn get(&self, name: &str) -> Option<String> {
        (self.0)(name).filter(|value| !value.is_empty())
    }

    fn has(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    fn number(&self, name: &str) -> Result<usize> {
        let Some(value) = self.get(name) else {
            let message = format!("{name} is not set beside the launcher's other variables");
            return Err(Error::new(ErrorKind::Config, "find_ranks", message));
        };
        value.parse().map_err(|_| {
            let message = format!("{name} is no number");
            Error::new(ErrorKind::Config, "find_ranks", message).with("found", value)
        })
    }

    fn number_or(&self, name: &str, other: usize) -> Result<usize> {
        match self.has(name) {
            true => self.number(name),
            false => Ok(other),
        }
    }

    fn port(&self) -> Result<u16> {
        let Some(value) = self.get("MASTER_PORT") else {
            return Ok(DEFAULT_PORT);
        };
        value.parse().map_err(|_| {
            let message = "MASTER_PORT is no port";
            Error::new(ErrorKind::Config, "find_ranks", message)
                .with("expected", "1 to 65535")
                .with("found", value)
        })
    }

    fn interface(&self) -> Option<String> {
        self.get("GLOO_SOCKET_IFNAME")
    }

    /// `MASTER_ADDR`; else this machine, where all ranks are on it.
    fn host(&self, launcher: &'static str, all_here: bool) -> Result<String> {
        match self.get("MASTER_ADDR") {
            Some(host) => Ok(host),
            None if all_here => Ok("127.0.0.1".to_owned()),
            None => {
                let message = "ranks are on several machines and MASTER_ADDR is not set";
                Err(Error::new(ErrorKind::Config, "find_ranks", message)
                    .with("launcher", launcher)
                    .help("set MASTER_ADDR to the machine of rank 0"))
            }
        }
    }
}

fn torchrun(variables: &Variables<'_>) -> Result<Launched> {
    let world_size = variables.number("WORLD_SIZE")?;
    let rank = variables.number("RANK")?;
    let local_size = variables.number_or("LOCAL_WORLD_SIZE", world_size)?;
    let attempt = variables.number_or("TORCHELASTIC_RESTART_COUNT", 0)?;
    let run = variables.get("TORCHELASTIC_RUN_ID");
    let agent = variables.get("TORCHELASTIC_USE_AGENT_STORE");
    Ok(Launched {
        launcher: "torchrun",
        rank,
        world_size,
        local_rank: variables.number_or("LOCAL_RANK", rank)?,
        local_size,
        host: variables.host("torchrun", local_size == world_size)?,
        port: variables.port()?,
        launcher_keeps_store: agent.is_some_and(|value| value.eq_ignore_ascii_case("true")),
        name: format!("{}/{attempt}", run.as_deref().unwrap_or("job")),
        interface: variables.interface(),
    })
}

fn slurm(variables: &Variables<'_>) -> Result<Launched> {
    let world_size = variables.number("SLURM_STEP_NUM_TASKS")?;
    let nodes = variables.number_or("SLURM_STEP_NUM_NODES", 1)?;
    let first = variables
        .get("SLURM_STEP_NODELIST")
        .and_then(|list| first_host(&list));
    let host = match (variables.get("MASTER_ADDR"), first) {
        (Some(host), _) => host,
        (None, Some(host)) if nodes > 1 => host,
        (None, _) => variables.host("Slurm", nodes == 1)?,
    };
    // Two steps on one machine at a time would meet at one port.
    let job = variables.number_or("SLURM_JOB_ID", 0)?;
    let port = match variables.has("MASTER_PORT") {
        true => variables.port()?,
        false => DEFAULT_PORT + (job % 1000) as u16,
    };
    Ok(Launched {
        launcher: "Slurm",
        rank: variables.number("SLURM_PROCID")?,
        world_size,
        local_rank: variables.number("SLURM_LOCALID")?,
        local_size: tasks_here(variables).unwrap_or(world_size.div_ceil(nodes.max(1))),
        host,
        port,
        launcher_keeps_store: false,
        name: format!("{job}.{}", variables.number_or("SLURM_STEP_ID", 0)?),
        interface: variables.interface(),
    })
}

/// The first machine of a Slurm list: `gpu[003-007,12],cpu1` begins with `gpu003`.
fn first_host(list: &str) -> Option<String> {
    let end = list.find(['[', ',']).unwrap_or(list.len());
    let (name, rest) = list.split_at(end);
    let number = match rest.strip_prefix('[') {
        Some(numbers) => numbers.split(['-', ',', ']']).next()?,
        None => "",
    };
    let suffix = match number.is_empty() {
        true => "",
        // What follows the brackets belongs to the name.
        false => rest.split_once(']')?.1.split(',').next()?,
    };
    Some(format!("{name}{number}{suffix}")).filter(|host| !host.is_empty())
}

/// Tasks on this machine: `SLURM_STEP_TASKS_PER_NODE` is such as `4(x2),3`.
fn tasks_here(variables: &Variables<'_>) -> Option<usize> {
    let list = variables.get("SLURM_STEP_TASKS_PER_NODE")?;
    let node: usize = variables.get("SLURM_NODEID")?.parse().ok()?;
    let mut before = 0;
    for entry in list.split(',') {
        let (tasks, times) = match entry.split_once("(x") {
            Some((tasks, times)) => (tasks, times.strip_suffix(')')?.parse().ok()?),
            None => (entry, 1usize),
        };
        before += times;
        if node < before {
            return tasks.parse().ok();
        }
    }
    None
}

fn open_mpi(variables: &Variables<'_>) -> Result<Launched> {
    let world_size = variables.number("OMPI_COMM_WORLD_SIZE")?;
    let local_size = variables.number_or("OMPI_COMM_WORLD_LOCAL_SIZE", world_size)?;
    Ok(Launched {
        launcher: "Open MPI",
        rank: variables.number("OMPI_COMM_WORLD_RANK")?,
        world_size,
        local_rank: variables.number("OMPI_COMM_WORLD_LOCAL_RANK")?,
        local_size,
        host: variables.host("Open MPI", local_size == world_size)?,
        port: variables.port()?,
        launcher_keeps_store: false,
        name: "job".to_owned(),
        interface: variables.interface(),
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn found(pairs: &[(&str, &str)]) -> Result<Option<Launched>> {
        let all: BTreeMap<&str, &str> = pairs.iter().copied().collect();
        find(&|name| all.get(name).map(|value| (*value).to_owned()))
    }

    #[test]
    fn nothing_said_is_threads() {
        assert_eq!(found(&[]).unwrap(), None);
        assert_eq!(found(&[("RANK", "0"), ("WORLD_SIZE", "1")]).unwrap(), None);
        // A shell inside an allocation is no step.
        let shell = [
            ("SLURM_PROCID", "0"),
            ("SLURM_NTASKS", "8"),
            ("SLURM_LOCALID", "0"),
        ];
        assert_eq!(found(&shell).unwrap(), None);
    }

    #[test]
    fn torchruns_variables() {
        let said: Vec<(&str, String)> = variables(1, 4, 1234).collect();
        let said: Vec<(&str, &str)> = said.iter().map(|(k, v)| (*k, v.as_str())).collect();
        let launched = found(&said).unwrap().unwrap();
        assert_eq!(
            (launched.rank, launched.world_size, launched.local_rank),
            (1, 4, 1)
        );
        let meet = launched.rendezvous(Duration::from_secs(2), Duration::from_secs(1));
        assert_eq!((meet.port, meet.launcher_keeps_store), (1234, true));
        let error = found(&[("RANK", "x"), ("WORLD_SIZE", "2")]).unwrap_err();
        assert!(error.to_string().contains("RANK is no number"));
        let far = [
            ("RANK", "3"),
            ("WORLD_SIZE", "4"),
            ("LOCAL_RANK", "1"),
            ("LOCAL_WORLD_SIZE", "2"),
        ];
        assert!(found(&far).unwrap_err().to_string().contains("MASTER_ADDR"));
        let beyond = [("RANK", "4"), ("WORLD_SIZE", "4")];
        assert!(found(&beyond).unwrap_err().to_string().contains("4 of 4"));
        let port = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_PORT", "70000")];
        assert!(
            found(&port)
                .unwrap_err()
                .to_string()
                .contains("MASTER_PORT")
        );
    }

    #[test]
    fn a_slurm_step() {
        let step = [
            ("SLURM_PROCID", "5"),
            ("SLURM_STEP_NUM_TASKS", "7"),
            ("SLURM_STEP_NUM_NODES", "2"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_NODEID", "1"),
            ("SLURM_STEP_TASKS_PER_NODE", "4,3"),
            ("SLURM_STEP_NODELIST", "gpu[003-004]-ib"),
            ("SLURM_JOB_ID", "12345"),
            ("SLURM_STEP_ID", "0"),
        ];
        let launched = found(&step).unwrap().unwrap();
        assert_eq!((launched.rank, launched.world_size), (5, 7));
        assert_eq!((launched.local_rank, launched.local_size), (1, 3));
        assert_eq!(
            (launched.host.as_str(), launched.port),
            ("gpu003-ib", 29845)
        );
        for (list, first) in [
            ("a1", "a1"),
            ("a1,b2", "a1"),
            ("n[7,9-11]", "n7"),
            ("n[01-03],m4", "n01"),
        ] {
            assert_eq!(first_host(list).as_deref(), Some(first));
        }
    }

    #[test]
    fn open_mpis_variables() {
        let all = [
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ];
        let launched = found(&all).unwrap().unwrap();
        assert_eq!(
            (launched.rank, launched.host.as_str(), launched.port),
            (1, "127.0.0.1", 29500)
        );
    }
}
