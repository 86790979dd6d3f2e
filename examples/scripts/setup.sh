#!/bin/sh
# Make an environment for the scripts with other libraries: examples/scripts/.venv
# It sees the packages of Paceline's own environment (torch, numpy, paceline) and adds the pinned
# ones of requirements.txt. Usage: sh examples/scripts/setup.sh [PYTHON of Paceline]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=${1:-$here/../../.venv/bin/python}
own="$here/.venv"
"$python" -m venv --without-pip "$own"
site=$("$own/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
main=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
programs=$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')
echo "import site; site.addsitedir('$main')" >"$site/paceline_environment.pth"
"$python" -m pip --python "$own/bin/python" install --quiet -r "$here/requirements.txt"
# Paceline's own Python runs, so that its mpirun and its MPI library are found.
cat >"$own/bin/paceline" <<END
#!/bin/sh
export PYTHONPATH="$site\${PYTHONPATH:+:\$PYTHONPATH}"
exec "$programs/python" -m paceline.cli "\$@"
END
chmod +x "$own/bin/paceline"
echo "ready: $own/bin/paceline run FILE.py"
