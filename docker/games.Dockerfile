# envkit/games: the image of sandboxes that run environments: envkit and its dependencies, on a base with Python 3.11 or newer.
# `envkit image build games` makes the build context: the wheels of the dependencies, and the installed envkit.
ARG BASE
FROM ${BASE} AS install
ARG BUILD
LABEL envkit.stage=${BUILD}
COPY wheels /wheels
RUN python3 "$(echo /wheels/pip-*.whl)/pip" install --quiet --root-user-action ignore --no-cache-dir \
    --no-index --find-links /wheels --target /opt/envkit --requirement /wheels/requirements.txt
COPY envkit /opt/envkit/envkit
RUN python3 -m compileall -q /opt/envkit/envkit

FROM ${BASE}
COPY --from=install /opt/envkit /opt/envkit
COPY data /data
ENV PYTHONPATH=/opt/envkit PYTHONDONTWRITEBYTECODE=1 ENVKIT_DATA=/data
